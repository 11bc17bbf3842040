"""Training with xent gives the same language model, policy or student as with the framework's own operations."""

import math
from typing import Any

import pytest

from tests.convergence.agreement import disagreements
from tests.convergence.distillation import DISTILLATIONS
from tests.convergence.policy import POLICIES
from tests.convergence.training import LOSSES, Loss, Run, from_logits, penalized, train, vocabulary
from tests.targets import Target

ALL = LOSSES | POLICIES | DISTILLATIONS
FALLS_BY = {"log_probs": 1.0, "linear_log_probs": 1.0, "divergence": 0.1, "linear_divergence": 1.0}
"""The minimum decrease of the loss, 2 otherwise; a model that learns nothing would prove nothing."""

RUNS: dict[tuple[str, str, str], Run] = {}


def plain_run(target: Target, function: str, dtype: str) -> Run:
    key = (str(target), function, dtype)
    if key not in RUNS:
        RUNS[key] = train(target, ALL[function][0], dtype)
    return RUNS[key]


def differences(target: Target, function: str, dtype: str, loss: Loss) -> list[str]:
    """Return how training with a loss differs from training with the framework's own operations."""
    ours = train(target, loss, dtype)
    plain, exact = (plain_run(target, function, kind) for kind in (dtype, "float32"))
    return disagreements(ours, plain, exact, dtype, not function.startswith("linear"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", ALL)
def test_same_model(target: Target, function: str, dtype: str) -> None:
    if target.slow and (dtype == "float32") == function.startswith("linear"):
        return  # the matrix judges these kernels, and other sessions train with all of them
    if target.takes(dtype):
        assert differences(target, function, dtype, ALL[function][1]) == []


def overwrites_logits(target: Target, arrays: tuple[Any, ...], classes: Any, options: dict[str, Any]) -> Any:
    """Write the gradient into the logits' memory without telling autograd, as a kernel could."""
    import torch

    def loss(logits: Any) -> Any:
        value = target.harness.unfused_loss(logits.clone(), classes, **options)
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        logits.data.copy_(gradient)
        return value

    return penalized(target, arrays, loss)


def drops_the_softcap(target: Target, arrays: tuple[Any, ...], classes: Any, options: dict[str, Any]) -> Any:
    """Lose an option whose effect on the first losses is small."""
    return from_logits(target, arrays, classes, {**options, "softcap": None})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", [overwrites_logits, drops_the_softcap])
def test_fault_is_found(target: Target, loss: Loss, dtype: str) -> None:
    if target.takes(dtype) and (loss is not overwrites_logits or target.backend.framework == "torch"):
        assert differences(target, "cross_entropy", dtype, loss)  # MLX arrays are immutable


@pytest.mark.parametrize("function", ALL)
def test_it_learns(target: Target, function: str) -> None:
    losses = plain_run(target, function, "float32").losses
    if function in LOSSES:
        assert losses[0] == pytest.approx(math.log(vocabulary()), rel=0.1)
    if not target.interpreted:  # interpreted runs have too few steps
        assert min(losses[-5:]) <= losses[0] - FALLS_BY.get(function, 2.0)
