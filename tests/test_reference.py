"""Verify the reference by finite differences and by definitions (see also torch/test_pytorch_agrees.py)."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import xent
from tests.cases import FUNCTIONS, LOG_PROBS
from tests.options import LOG_PROB_OPTIONS, OPTIONS, option_cases
from xent.backends.reference import gradients
from xent.command.check.case import Case, make_inputs
from xent.command.check.judge import call_of
from xent.core.spec import DIFFERENTIABLE, LOG_PROB_STATS

STEP = 1e-6
ONE_STATISTIC = [
    Case(
        function, (), 0, "float64", f"{options}, {name} alone", OPTIONS[options], "none", stats=(name,), missing=missing
    )
    for function in FUNCTIONS
    for options in ("all", "probabilities, all", "ignore_index, a class")
    for name in DIFFERENTIABLE
    for missing in [("loss",)]
]
CASES = [
    replace(case, rows=(2, 5), vocabulary=7, hidden=3)
    for case in [
        *(case for function in (*FUNCTIONS, *LOG_PROBS) for case in option_cases(function, "float64")),
        *ONE_STATISTIC,
    ]
]


def slopes(total: Callable[..., Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the derivative of a number by each element of each array."""
    found = {}
    for name, values in arrays.items():
        found[name] = np.empty_like(values)
        for index in np.ndindex(values.shape):
            ends = []
            for sign in (1, -1):
                moved = values.copy()
                moved[index] += sign * STEP
                ends.append(total(**(arrays | {name: moved})))
            found[name][index] = (ends[0] - ends[1]) / (2 * STEP)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_equals_finite_differences(case: Case) -> None:
    inputs = make_inputs(case)
    upstream = {case.results[0]: inputs.upstream} | inputs.others

    def total(**differentiable: Any) -> Any:
        returned = getattr(xent, case.function)(
            **{"target": inputs.target} | differentiable, **inputs.options, **case.keywords
        )
        found = case.results_in(returned)
        # A target outside its support has an infinite result for all logits, and so no gradient.
        return sum(
            np.where(np.isfinite(found[name]), found[name], 0.0).ravel() @ np.ravel(upstream[name])
            for name in case.results
            if upstream.get(name) is not None
        )

    call = call_of(case, inputs.differentiable, inputs.options | {"target": inputs.target})
    given = {name: values for name, values in inputs.others.items() if name != case.results[0]}
    first = np.zeros(case.rows) if inputs.upstream is None else inputs.upstream
    first = first if case.function in FUNCTIONS else -first
    analytic = gradients(call, first, **given)
    trained = inputs.differentiable | ({"target": inputs.target} if case.trained else {})
    for name, numeric in slopes(total, trained).items():
        gradient = analytic[name]
        assert np.abs(gradient).sum() > 0, name
        np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=2e-8)


def defined(logits: list[float], target: int, allowed: set[int], options: dict[str, float]) -> dict[str, float]:
    """Compute the results of one row by their definitions, with Python numbers."""
    scale, cap, temperature = options["logit_scale"], options["softcap"], options["temperature"]
    x = {c: (cap * math.tanh(scale * logits[c] / cap) if cap else scale * logits[c]) / temperature for c in allowed}
    total = sum(math.exp(value) for value in x.values())
    p = {c: math.exp(value) / total for c, value in x.items()}
    best = max(sorted(x), key=lambda c: x[c])
    return {
        "log_probs": math.log(p[target]) if target in p else -math.inf,
        "entropy": -sum(each * math.log(each) for each in p.values()),
        "lse": math.log(total),
        "predictions": best,
        "log_sum_sq_probs": math.log(sum(each**2 for each in p.values())),
        "mean_logit": sum(x.values()) / len(x),
        "accuracy": float(best == target),
        "rank": sum(value > x.get(target, -math.inf) for value in x.values()),
    }


@pytest.mark.parametrize("name", LOG_PROB_OPTIONS)
@pytest.mark.parametrize(("function", "shift"), [("log_probs", 0), ("linear_log_probs", 0), ("linear_log_probs", 2)])
def test_log_probabilities_equal_their_definition(function: str, shift: int, name: str) -> None:
    options = LOG_PROB_OPTIONS[name]
    case = Case(function, (3, 7), 11, "float64", "", options, "none", bias=function != "log_probs", shift=shift)
    inputs = make_inputs(case)
    named, loop = inputs.differentiable, {"shift": shift} if case.is_linear else {}
    log_probs, entropy, stats = getattr(xent, function)(
        **named, target=inputs.target, **inputs.options, **loop, entropy=True, stats=LOG_PROB_STATS
    )
    found = {"log_probs": log_probs, "entropy": entropy} | {each: getattr(stats, each) for each in LOG_PROB_STATS}
    logits = named["input"] @ named["linear_weight"].T + named["linear_bias"] if case.is_linear else named["logits"]
    support = inputs.options.get("support")
    seen = set()
    for sequence, place in np.ndindex(case.rows):
        there, row = place + shift, sequence * 7 + place + shift
        target = inputs.target[sequence, there] if there < 7 else -100
        if target == inputs.options.get("ignore_index", -100) or there >= 7:
            expected = dict.fromkeys(found, 0.0) | {"predictions": -1, "rank": -1}
        else:
            allowed = set(range(11))
            if support is not None:
                allowed = set(support.ids[support.offsets[row] : support.offsets[row + 1]].tolist())
            temperature = inputs.options.get("temperature", 1.0)
            numbers = {"logit_scale": 1.0, "softcap": 0.0} | inputs.options
            numbers["temperature"] = (
                temperature[sequence, there] if options.get("temperature") == "rows" else temperature
            )
            expected = defined(logits[sequence, place].tolist(), int(target), allowed, numbers)
        seen.add(expected["log_probs"])
        for each, values in found.items():
            assert values.shape == case.rows
            assert values[sequence, place] == pytest.approx(expected[each], rel=1e-11, abs=1e-13), each
    assert len(seen) > 5
    assert (-math.inf in seen) == (support is not None)


def test_a_support_of_one_class_and_of_none() -> None:
    support = xent.Support(np.array([1]), np.array([0, 1, 1]))
    (log_probs, entropy, stats) = xent.log_probs(
        np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1, 1]), support=support, entropy=True, stats=("lse", "mean_logit")
    )
    np.testing.assert_array_equal(log_probs, [0.0, -np.inf])
    np.testing.assert_array_equal(entropy, [0.0, 0.0])
    np.testing.assert_array_equal(stats.lse, [2.0, -np.inf])
    np.testing.assert_array_equal(stats.mean_logit, [2.0, 0.0])


def test_statistics_of_loss_and_log_probabilities_are_equal() -> None:
    case = Case("cross_entropy", (5,), 9, "float64", "")
    inputs = make_inputs(case)
    names = ("lse", "entropy", "predictions", "log_sum_sq_probs", "mean_logit")
    _, stats = xent.cross_entropy(**inputs.differentiable, target=inputs.target, softcap=3.0, stats=names)
    log_probs, entropy, more = xent.log_probs(
        **inputs.differentiable,
        target=inputs.target,
        softcap=3.0,
        entropy=True,
        stats=[name for name in names if name != "entropy"],
    )
    for name in names:
        np.testing.assert_array_equal(getattr(stats, name), entropy if name == "entropy" else getattr(more, name))
    loss = xent.cross_entropy(**inputs.differentiable, target=inputs.target, softcap=3.0, reduction="none")
    np.testing.assert_array_equal(log_probs, 0 - loss)
