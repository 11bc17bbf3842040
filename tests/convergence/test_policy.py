"""Training a policy with xent's log-probabilities and entropy gives the same policy as the framework's operations.

Faults are planted in the gradient of the entropy, in the use of the temperature, and in masked rows.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.convergence.agreement import disagreements
from tests.convergence.policy import POLICIES, Rows, of_hidden, of_logits, still
from tests.convergence.training import Loss, Run, train
from tests.targets import Target

FALLS_BY = 1.0
RUNS: dict[tuple[str, str, str], Run] = {}


def plain_run(target: Target, function: str, dtype: str) -> Run:
    key = (str(target), function, dtype)
    if key not in RUNS:
        RUNS[key] = train(target, POLICIES[function][0], dtype)
    return RUNS[key]


def found(target: Target, function: str, dtype: str, loss: Loss) -> list[str]:
    ours = train(target, loss, dtype)
    plain, exact = (plain_run(target, function, kind) for kind in (dtype, "float32"))
    return disagreements(ours, plain, exact, dtype, function == "log_probs")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", POLICIES)
def test_same_policy(target: Target, function: str, dtype: str) -> None:
    if target.takes(dtype):
        assert found(target, function, dtype, POLICIES[function][1]) == []


@pytest.mark.parametrize("function", POLICIES)
def test_it_learns(target: Target, function: str) -> None:
    losses = plain_run(target, function, "float32").losses
    if not target.interpreted:  # interpreted runs have too few steps
        assert min(losses[-5:]) <= losses[0] - FALLS_BY


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


FAULTS: dict[str, tuple[str, str, Callable[[Target], Rows]]] = {
    "no gradient of the entropy": ("linear_log_probs", "bfloat16", lambda target: entropy_with(target, 0.0)),
    "the entropy's gradient negated": ("log_probs", "bfloat16", lambda target: entropy_with(target, -1.0)),
    "the entropy's gradient 1% off": ("linear_log_probs", "float32", lambda target: entropy_with(target, 1.01)),
    "the temperature left out": ("log_probs", "float32", without_slope),
    "masked rows count": ("linear_log_probs", "float32", with_masked_rows),
}
"""Fault -> (function, dtype, how it is planted)."""


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(target: Target, fault: str) -> None:
    function, dtype, plant = FAULTS[fault]
    if target.slow or not target.takes(dtype):
        return  # a fault has the same effect on every backend
    loss = of_logits(plant(target)) if function == "log_probs" else of_hidden(plant(target))
    assert found(target, function, dtype, loss)
