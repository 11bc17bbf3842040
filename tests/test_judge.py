"""Tests of the tests: planted wrong gradients fail the comparison in every dtype."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cases import FUNCTIONS, LOG_PROBS
from tests.options import option_cases
from tests.targets import Target
from xent.command.check.case import Case
from xent.command.check.judge import Comparison, compare, results_of_case, typical_of

MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "zero": lambda grad: grad * 0,
    "negated": lambda grad: -grad,
    "doubled": lambda grad: 2 * grad,
    "rows shifted": lambda grad: np.roll(grad, 1, axis=-2 if grad.ndim > 1 else -1),
    "classes shifted": lambda grad: np.roll(grad, 1, axis=-1),
    "one row zero": lambda grad: _with_one_row(grad, 0.0),
    "one row 5% off": lambda grad: _with_one_row(grad, 1.05),
    "one NaN": lambda grad: _with_one(grad, np.nan),
    "something in a zero row": lambda grad: grad + 1e-12 * (np.abs(grad).sum(-1, keepdims=True) == 0),
}


@pytest.mark.parametrize("function", [*FUNCTIONS, *LOG_PROBS])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_wrong_result_or_gradient_fails(target: Target, function: str, dtype: str, mutation: str) -> None:
    for case in _some(target, function, dtype):
        truth, made, plain, sizes = results_of_case(target.backend, target.harness, case)
        for name in case.results:
            for factor in (0.0, -1.0, 2.0, 1.1, np.nan):
                infinite = np.isinf(made[name])
                wrong = np.where(infinite, made[name], factor * np.where(infinite, 0.0, made[name]))
                assert not compare(name, wrong, truth[name], plain[name], case, sizes.get(name)).passed
        for name in truth.keys() - set(case.results):
            if mutation == "something in a zero row" and (np.abs(truth[name]).sum(-1) > 0).all():
                continue
            assert compare(name, made[name], truth[name], plain[name], case, sizes.get(name)).passed
            assert not compare(
                name, MUTATIONS[mutation](made[name]), truth[name], plain[name], case, sizes.get(name)
            ).passed


@pytest.mark.parametrize("case", [0, 1])
@pytest.mark.parametrize("place", ["log_probs", "entropy"])
def test_infinite_values_must_be_equal(case: int, place: str) -> None:
    values = np.array([-np.inf, -1.0])
    some = Case("log_probs", (2,), 3, "float32", "", entropy=True)
    assert compare(place, values, values, values, some).passed
    wrong = np.array([[np.inf, -1.0], [-1e30, -1.0]][case])
    assert not compare(place, wrong, values, values, some).passed


@pytest.mark.parametrize(
    ("output", "dtype", "error"),
    [("logits", "float64", 2.0**-40), ("logits", "float32", 2.0**-20), ("loss", "bfloat16", 2.0**-20)],
)
def test_error_beyond_the_rounding_of_the_dtype_fails(output: str, dtype: str, error: float) -> None:
    case, truth = Case("cross_entropy", (2,), 3, dtype, ""), np.ones((2, 3))
    assert compare(output, truth, truth, truth, case).passed
    assert not compare(output, truth * (1 + error), truth, truth, case).passed


def test_wrong_shape_fails_even_if_it_broadcasts() -> None:
    case, truth = Case("cross_entropy", (2,), 3, "float32", ""), np.ones((2, 3))
    assert compare("logits", np.ones((2, 3)), truth, truth, case).passed
    assert not compare("logits", np.ones((1, 3)), truth, truth, case).passed


def _some(target: Target, function: str, dtype: str) -> list[Case]:
    if not target.takes(dtype):
        return []
    names = ("plain", "all", "all, statistics", "all, lse", "probabilities, all, statistics, trained")
    return [replace(case, rows=(2, 6)) for case in option_cases(function, dtype) if case.name in names]


def _with_one_row(grad: Any, factor: float) -> Any:
    changed = np.array(grad)
    flat = changed.reshape(-1, changed.shape[-1])
    flat[np.abs(flat).sum(-1).argmax()] *= factor
    return changed


def _with_one(grad: Any, value: float) -> Any:
    changed = np.array(grad)
    changed.flat[changed.size // 2] = value
    return changed


TYPICAL: dict[str, tuple[list[tuple[float, float]], bool]] = {
    "all within": ([(1.0, 1.5)] * 24, True),
    "one by chance beyond": ([(1.0, 1.5)] * 23 + [(2.9, 1.5)], True),
    "all a little beyond": ([(1.6, 1.5)] * 24, False),
    "most beyond": ([(3.0, 1.5)] * 18 + [(0.9, 1.5)] * 6, False),
    "one far beyond": ([(1.0, 1.5)] * 23 + [(3.1, 1.5)], False),
    "one far beyond its own, another with a larger bound": ([(1.0, 1.5)] * 22 + [(6.1, 1.5), (4.0, 6.0)], True),
    "one NaN": ([(1.0, 1.5)] * 23 + [(np.nan, 1.5)], False),
    "exact": ([(0.0, 1e-7)] * 24, True),
}


@pytest.mark.parametrize("name", TYPICAL)
def test_typical_draw(name: str) -> None:
    draws, passes = TYPICAL[name]
    assert typical_of([Comparison("input", *draw) for draw in draws]).passed == passes
