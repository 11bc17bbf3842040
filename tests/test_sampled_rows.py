"""Log-probabilities with arguments per row: ignored rows, targets, temperatures and supports."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import xent
from tests.calls import call_of, log_prob_case, results_of, upstream_of
from tests.cases import LOG_PROBS
from tests.targets import Target
from xent.command.check.case import make_inputs


def test_target_outside_its_support(target: Target) -> None:
    support = xent.Support(*target.arrays(np.array([0, 2, 1], np.int32), np.array([0, 2, 3, 3], np.int32)))
    logits, classes, ones = target.arrays(np.arange(9.0).reshape(3, 3), np.array([1, 1, 1]), np.ones(3))

    def call(given: Any) -> Any:
        return xent.log_probs(given, classes, support=support, entropy=True, backend=target.name)

    (log_probs, entropy), (gradient,) = target.harness.gradients(call, (logits,), (ones, None))
    target.same(log_probs, [-np.inf, 0.0, -np.inf])
    expected = xent.log_probs(np.array([[0.0, 2.0]]), np.array([0]), entropy=True)[1]
    target.close(entropy, [*expected, 0.0, 0.0], rtol=1e-6)
    assert (target.harness.numpy(gradient) == 0).all()
    _, (gradient,) = target.harness.gradients(call, (logits,), (ones, ones))
    gradient = target.harness.numpy(gradient)
    assert (gradient[1:] == 0).all()
    assert (gradient[0] != 0).tolist() == [True, False, True]
    support = xent.Support(*target.arrays(np.zeros(0, np.int32), np.zeros(4, np.int32)))
    _, stats = xent.log_probs(logits, classes, support=support, stats=("lse",), backend=target.name)
    target.same(stats.lse, np.full(3, -np.inf))
    (log_probs, entropy), (gradient,) = target.harness.gradients(call, (logits,), (ones, ones))
    target.same(log_probs, np.full(3, -np.inf))
    for zero in (entropy, gradient):
        assert not target.harness.numpy(zero).any()


def test_support_of_all_classes_equals_none(target: Target) -> None:
    case = replace(log_prob_case("log_probs", "rows"), stats=())
    inputs = make_inputs(case)
    ids = np.concatenate([np.random.default_rng(row).permutation(67) for row in range(12)])
    every = xent.Support(*target.arrays(ids, np.arange(13) * 67))
    found, expected = (results_of(target, case, inputs, support=support) for support in (every, None))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("function", LOG_PROBS)
@pytest.mark.parametrize("options", ["rows", "support"])
@pytest.mark.parametrize(
    ("wrong", "value"),
    [
        ("target", 2**40), ("temperature", -1.0), ("temperature", 0.0), ("temperature", np.nan), ("support", -1),
        ("support", 9), ("support", 2**31 + 1), ("support", 2**40), ("support", -(2**33)),
    ],
)  # fmt: skip
def test_unchecked_invalid_values_give_nan_in_their_row(
    target: Target, function: str, wrong: str, value: float, options: str
) -> None:
    """Invalid targets, ids and temperatures never cause reads or writes out of bounds. Ignored rows may have any."""
    if wrong == "support" and options != wrong:
        return
    case = log_prob_case(function, options, rows=(6,), vocabulary=9, ignored=0.0, shift=0, stats=())
    inputs = make_inputs(case)
    inputs.target[3] = -100
    if wrong == "target":
        inputs.target[1] = value
    elif wrong == "temperature":
        inputs.options["temperature"][[1, 3]] = value
    else:
        support = inputs.options["support"]
        support.ids[support.offsets[1]] = value
    call, arrays = call_of(target, case, inputs)
    if target.looks_at_targets:
        with pytest.raises((IndexError, ValueError)):
            call(*arrays)
        return
    (log_probs, entropy), gradients = target.harness.gradients(call, arrays, upstream_of(target, case, inputs))
    bad = np.arange(6) == 1
    np.testing.assert_array_equal(np.isnan(target.harness.numpy(log_probs)), bad)
    assert np.isfinite(target.harness.numpy(entropy)[~bad]).all()
    gradient = target.harness.numpy(gradients[0])
    assert np.isnan(gradient[bad]).all()
    assert np.isfinite(gradient[~bad]).all()
    assert not gradient[3].any()
