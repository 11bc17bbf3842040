"""Training a language model with xent gives the same model as training with the framework's own loss."""

import math

import pytest

from tests.convergence.agreement import disagreements
from tests.convergence.training import LOSSES, Run, train, vocabulary
from tests.targets import Target

FALLS_BY = 2.0
"""The minimum decrease of the loss in nats; a model that learns nothing would prove nothing."""

RUNS: dict[tuple[str, str, str], Run] = {}


def plain_run(target: Target, function: str, dtype: str) -> Run:
    key = (str(target), function, dtype)
    if key not in RUNS:
        RUNS[key] = train(target, LOSSES[function][0], dtype)
    return RUNS[key]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", LOSSES)
def test_same_model(target: Target, function: str, dtype: str) -> None:
    if not target.takes(dtype):
        return
    ours = train(target, LOSSES[function][1], dtype)
    plain, exact = (plain_run(target, function, kind) for kind in (dtype, "float32"))
    assert disagreements(ours, plain, exact, dtype, function == "cross_entropy") == []


@pytest.mark.parametrize("function", LOSSES)
def test_it_learns(target: Target, function: str) -> None:
    losses = plain_run(target, function, "float32").losses
    assert losses[0] == pytest.approx(math.log(vocabulary()), rel=0.1)
    if not target.interpreted:  # interpreted runs have too few steps
        assert min(losses[-5:]) <= losses[0] - FALLS_BY
