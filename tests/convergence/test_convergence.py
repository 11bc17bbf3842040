"""Training with xent gives the same language model, policy or student as with the framework's own operations."""

import math

import pytest

from tests.convergence.agreement import disagreements
from tests.convergence.distillation import DISTILLATIONS
from tests.convergence.policy import POLICIES
from tests.convergence.training import LOSSES, Loss, Run, train, vocabulary
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


@pytest.mark.parametrize("function", ALL)
def test_it_learns(target: Target, function: str) -> None:
    losses = plain_run(target, function, "float32").losses
    if function in LOSSES:
        assert losses[0] == pytest.approx(math.log(vocabulary()), rel=0.1)
    if not target.interpreted:  # interpreted runs have too few steps
        assert min(losses[-5:]) <= losses[0] - FALLS_BY.get(function, 2.0)
