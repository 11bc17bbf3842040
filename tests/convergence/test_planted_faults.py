"""The convergence test finds planted faults of kinds that losses have had.

Each fault is small, or does not show in the first losses. If one of these tests fails, the convergence test no longer
finds that fault.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.convergence.agreement import disagreements
from tests.convergence.policy import Rows, of_hidden, of_logits, still
from tests.convergence.test_convergence import differences, plain_run
from tests.convergence.training import Loss, from_hidden, from_logits, penalized, train
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


def drops_a_mask(loss: Loss) -> Loss:
    """Count one masked row in each batch."""

    def faulty(target: Target, arrays: tuple[Any, ...], classes: Any, options: dict[str, Any]) -> Any:
        values = target.harness.numpy(classes).copy()
        values[(values == -100).nonzero()[0][:1]] = 0
        return loss(target, arrays, target.arrays(values)[0], options)

    return faulty


def drops_the_softcap(target: Target, arrays: tuple[Any, ...], classes: Any, options: dict[str, Any]) -> Any:
    """Lose an option whose effect on the first losses is small."""
    return from_logits(target, arrays, classes, {**options, "softcap": None})


def entropy_with(target: Target, factor: float) -> Rows:
    """Return the same entropy with another gradient."""
    return lambda log_probs, entropy, _: (log_probs, still(target, entropy) * (1 - factor) + factor * entropy)


def without_slope(target: Target) -> Rows:
    """Leave the temperature out of dx/dz."""

    def taken(log_probs: Any, entropy: Any, temperature: Any) -> tuple[Any, Any]:
        constant = still(target, log_probs)
        return constant + temperature * (log_probs - constant), entropy

    return taken


def with_masked_rows(target: Target) -> Rows:
    """Give masked rows the mean entropy of all."""
    return lambda log_probs, entropy, _: (log_probs, entropy + (entropy == 0) * entropy.sum() / entropy.shape[0])


FAULTS: dict[str, tuple[str, Loss]] = {
    "overwritten logits": ("cross_entropy", overwrites_logits),
    "a mask dropped": ("cross_entropy", drops_a_mask(from_logits)),
    "a mask dropped, fused": ("linear_cross_entropy", drops_a_mask(from_hidden)),
    "the softcap dropped": ("cross_entropy", drops_the_softcap),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(target: Target, fault: str, dtype: str) -> None:
    function, loss = FAULTS[fault]
    if not target.takes(dtype) or (loss is overwrites_logits and target.backend.framework != "torch"):
        return  # MLX arrays are immutable
    assert differences(target, function, dtype, loss)


FAULTS_OF_POLICIES: dict[str, tuple[str, str, Callable[[Target], Rows]]] = {
    "no gradient of the entropy": ("linear_log_probs", "bfloat16", lambda target: entropy_with(target, 0.0)),
    "the entropy's gradient negated": ("log_probs", "bfloat16", lambda target: entropy_with(target, -1.0)),
    "the entropy's gradient 1% off": ("linear_log_probs", "float32", lambda target: entropy_with(target, 1.01)),
    "the temperature left out": ("log_probs", "float32", without_slope),
    "masked rows count": ("linear_log_probs", "float32", with_masked_rows),
}
"""Fault -> (function, dtype, how it is planted)."""


@pytest.mark.parametrize("fault", FAULTS_OF_POLICIES)
def test_fault_of_a_policy_is_found(target: Target, fault: str) -> None:
    """In the gradient of the entropy, in the use of the temperature, and in masked rows."""
    function, dtype, plant = FAULTS_OF_POLICIES[fault]
    if target.slow or not target.takes(dtype):
        return  # a fault has the same effect on every backend
    loss = of_logits(plant(target)) if function == "log_probs" else of_hidden(plant(target))
    assert differences(target, function, dtype, loss)


@pytest.mark.parametrize("number", range(4), ids=["embedding", "layer", "classifier", "bias"])
@pytest.mark.parametrize(("function", "loss"), [("cross_entropy", from_logits), ("linear_cross_entropy", from_hidden)])
def test_one_gradient_off_by_a_thousandth_is_found(target: Target, function: str, loss: Any, number: int) -> None:
    def spoil(gradients: list[Any]) -> None:
        gradients[number] *= 1.001

    ours, plain = train(target, loss, "float32", spoil), plain_run(target, function, "float32")
    found = disagreements(ours, plain, plain, "float32", function == "cross_entropy")
    assert any(name.startswith("change of the") for name in found)
