"""A test of the tests: the judge lets no wrong gradient pass, at any dtype."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cases import FUNCTIONS
from tests.targets import Target
from xent.core.check.cases import Case, option_cases
from xent.core.check.judge import compare, results_of_case

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


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_wrong_gradient_fails(target: Target, function: str, dtype: str, mutation: str) -> None:
    for case in _some(target, function, dtype):
        truth, made, plain = results_of_case(target.backend, target.harness, case)
        for name in truth:
            if name == "loss" or (mutation == "something in a zero row" and (np.abs(truth[name]).sum(-1) > 0).all()):
                continue
            assert compare(name, made[name], truth[name], plain[name], case).passed
            assert not compare(name, MUTATIONS[mutation](made[name]), truth[name], plain[name], case).passed


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0, 1.1, np.nan])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_wrong_loss_fails(target: Target, function: str, dtype: str, factor: float) -> None:
    for case in _some(target, function, dtype):
        truth, made, plain = results_of_case(target.backend, target.harness, case)
        assert not compare("loss", factor * made["loss"], truth["loss"], plain["loss"], case).passed


def _some(target: Target, function: str, dtype: str) -> list[Case]:
    if not target.takes(dtype):
        return []
    return [replace(case, rows=(2, 6)) for case in option_cases(function, dtype) if case.name in ("plain", "all")]


def _with_one_row(grad: Any, factor: float) -> Any:
    changed = np.array(grad)
    flat = changed.reshape(-1, changed.shape[-1])
    flat[np.abs(flat).sum(-1).argmax()] *= factor
    return changed


def _with_one(grad: Any, value: float) -> Any:
    changed = np.array(grad)
    changed.flat[changed.size // 2] = value
    return changed
