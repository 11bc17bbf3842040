"""The convergence test finds planted faults of kinds that losses have had.

Each fault is small, or does not show in the first losses. If one of these tests fails, the convergence test no longer
finds that fault.
"""

from typing import Any

import pytest

from tests.convergence.agreement import disagreements
from tests.convergence.test_convergence import plain_run
from tests.convergence.training import from_hidden, from_logits, penalized, train
from tests.targets import Target


def overwrites_logits(target: Target, arrays: tuple[Any, ...], classes: Any, options: dict[str, Any]) -> Any:
    """Write the gradient into the logits' memory without telling autograd, as a kernel could."""
    import torch

    def loss(logits: Any) -> Any:
        value = target.harness.unfused_loss(logits.clone(), classes, **options)
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        logits.data.copy_(gradient)
        return value

    return penalized(target, arrays, loss)


def drops_a_mask(target: Target, arrays: tuple[Any, ...], classes: Any, options: dict[str, Any]) -> Any:
    """Count one masked row in each batch."""
    values = target.harness.numpy(classes).copy()
    values[(values == -100).nonzero()[0][:1]] = 0
    return from_logits(target, arrays, target.arrays(values)[0], options)


def drops_a_mask_of_hidden(target: Target, arrays: tuple[Any, ...], classes: Any, options: dict[str, Any]) -> Any:
    """Count one masked row in each batch, in the fused loss."""
    values = target.harness.numpy(classes).copy()
    values[(values == -100).nonzero()[0][:1]] = 0
    return from_hidden(target, arrays, target.arrays(values)[0], options)


def drops_the_softcap(target: Target, arrays: tuple[Any, ...], classes: Any, options: dict[str, Any]) -> Any:
    """Lose an option whose effect on the first losses is small."""
    return from_logits(target, arrays, classes, {**options, "softcap": None})


FAULTS = {
    "overwritten logits": ("cross_entropy", overwrites_logits),
    "a mask dropped": ("cross_entropy", drops_a_mask),
    "a mask dropped, fused": ("linear_cross_entropy", drops_a_mask_of_hidden),
    "the softcap dropped": ("cross_entropy", drops_the_softcap),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(target: Target, fault: str, dtype: str) -> None:
    function, loss = FAULTS[fault]
    if not target.takes(dtype) or (loss is overwrites_logits and target.backend.framework != "torch"):
        return  # MLX arrays are immutable
    ours = train(target, loss, dtype)
    plain, exact = (plain_run(target, function, kind) for kind in (dtype, "float32"))
    assert disagreements(ours, plain, exact, dtype, function == "cross_entropy")


@pytest.mark.parametrize("number", range(4), ids=["embedding", "layer", "classifier", "bias"])
@pytest.mark.parametrize(("function", "loss"), [("cross_entropy", from_logits), ("linear_cross_entropy", from_hidden)])
def test_one_gradient_off_by_a_thousandth_is_found(target: Target, function: str, loss: Any, number: int) -> None:
    def spoil(gradients: list[Any]) -> None:
        gradients[number] *= 1.001

    ours, plain = train(target, loss, "float32", spoil), plain_run(target, function, "float32")
    found = disagreements(ours, plain, plain, "float32", function == "cross_entropy")
    assert any(name.startswith("change of the") for name in found)
