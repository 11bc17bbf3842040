"""Compare results and gradients with the float64 reference. The bound is the framework's own rounding error.

The reference gets the same inputs as the backend, rounded to the case's dtype. The error of each row of a gradient is
relative to the norm of the row, or, if there are several results, to the sum of the norms of their contributions. The
worst error must be at most 1.5 times the worst error of the framework's unfused computation on the same inputs, plus
two units in the last place (64 in float64). Rows whose gradient is exactly zero must be exactly zero. A zero, negated,
doubled or row-shifted gradient exceeds this bound by far in every dtype.

By chance, the unfused computation may round a few rows well on one processor and not on another. If one draw of the
inputs exceeds its bound, the worst errors of both over several draws are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from xent.backends.protocol import Backend, Harness
from xent.command.check.case import Case
from xent.command.check.results import ALONE, results_of_case

__all__ = ["Comparison", "compare", "judge_case", "typical_of", "worst_of"]

_SLACK = 1.5
_DRAWS = 8
# If teacher and student nearly agree, a gradient is a small difference of large numbers: a few rows decide the worst.
_DRAWS_OF_DIVERGENCES = 24
_MOST_OF_A_DRAW = 2
_NOTHING = 1e-30
_UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
# In float64 the bound covers the rounding errors of the backend and of the reference.
_UNITS_ALLOWED = {"float16": 2, "bfloat16": 2, "float32": 2, "float64": 64}


@dataclass(frozen=True)
class Comparison:
    """The error of one output of one case, and its bound."""

    output: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; false for NaN."""
        return self.error <= self.bound


def judge_case(
    backend: Backend, harness: Harness[Any], case: Case, seed: int = 0, workspace: int | None = None
) -> list[Comparison]:
    """Run a case on a backend, and compare its results and every gradient with the reference."""
    count, combined = (_DRAWS_OF_DIVERGENCES, typical_of) if case.is_divergence else (_DRAWS, worst_of)
    draws = [_judge_draw(backend, harness, case, seed, workspace)]
    if not all(comparison.passed for comparison in draws[0]):
        draws += [_judge_draw(backend, harness, case, seed + more, workspace) for more in range(1, count)]
    return [combined(same) for same in zip(*draws, strict=True)]


def _judge_draw(
    backend: Backend, harness: Harness[Any], case: Case, seed: int, workspace: int | None
) -> list[Comparison]:
    truth, made, plain, sizes = results_of_case(backend, harness, case, seed, workspace)
    return [compare(name, made[name], truth[name], plain[name], case, sizes.get(name)) for name in truth]


def worst_of(draws: Sequence[Comparison]) -> Comparison:
    """Return the worst error and the largest bound of several draws of one output."""
    errors, bounds = zip(*((draw.error, draw.bound) for draw in draws), strict=True)
    return Comparison(draws[0].output, float(np.max(errors)), float(np.max(bounds)))


def typical_of(draws: Sequence[Comparison]) -> Comparison:
    """Return the geometric means of error and bound over several draws; the worst draw if it is far beyond all bounds.

    This is for gradients that may nearly cancel. In the row that cancels most, rounding decides the worst error by
    chance, for the backend and for the unfused computation. The geometric means hardly depend on such a row.
    """
    worst = worst_of(draws)
    if not worst.error <= _MOST_OF_A_DRAW * worst.bound:
        return worst
    errors, bounds = ([max(getattr(draw, name), _NOTHING) for draw in draws] for name in ("error", "bound"))
    return Comparison(draws[0].output, *(float(np.exp(np.mean(np.log(values)))) for values in (errors, bounds)))


def compare(output: str, made: Any, truth: Any, plain: Any, case: Case, sizes: Any = None) -> Comparison:
    """Compare one output with the reference. The bound follows from the error of the unfused computation, `plain`.

    `sizes`: the values that the errors of a gradient's rows are relative to; None for the norm of each row.
    """
    dtype = case.dtype
    is_result = output.removesuffix(ALONE) in case.results
    if is_result and case.function != "linear_cross_entropy" and dtype != "float64":
        dtype = "float32"
    if output == "target" and dtype != "float64":  # class probabilities of a case are float32
        dtype = "float32"
    worst = _worst_result if is_result else partial(_worst_row, sizes)
    bound = _SLACK * worst(plain, truth) + _UNITS_ALLOWED[dtype] * _UNITS[dtype]
    return Comparison(output, worst(made, truth) if made.shape == truth.shape else np.inf, bound)


def _worst_result(values: Any, truth: Any) -> float:
    """Return the worst error over rows, relative to the largest absolute value. Infinite values must be equal."""
    infinite = np.isinf(truth)
    if (values[infinite] != truth[infinite]).any():
        return np.inf
    values, truth = np.where(infinite, 0.0, values), np.where(infinite, 0.0, truth)
    return float(np.abs(values - truth).max(initial=0) / max(np.abs(truth).max(initial=0), 1e-30))


def _worst_row(sizes: Any, values: Any, truth: Any) -> float:
    """Return the worst error over the rows of a gradient, relative to each row's size."""
    if not truth.size:
        return 0.0
    error = np.linalg.norm(np.atleast_2d(values - truth), axis=-1)
    size = np.linalg.norm(np.atleast_2d(truth), axis=-1) if sizes is None else sizes
    relative = np.where(size > 0, error / np.where(size > 0, size, 1.0), np.where(error > 0, np.inf, error))
    return float(relative.max())
