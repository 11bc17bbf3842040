"""The matrix of the divergences, on every backend: value and every gradient, against the float64 reference."""

import pytest

from tests.cases import DTYPES
from tests.divergence.cases import covering_divergences
from tests.targets import Target
from xent.core.check.divergence_cases import DivergenceCase, divergence_cases
from xent.core.check.divergence_judge import judge_divergence

FUNCTIONS = ("divergence", "linear_divergence")
CASES = [
    case
    for function in FUNCTIONS
    for dtype in DTYPES
    for case in (*divergence_cases(function, dtype), *covering_divergences(function, dtype))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_divergence_and_gradients(target: Target, case: DivergenceCase) -> None:
    if not target.takes(case.dtype):
        return
    for comparison in judge_divergence(target.backend, target.harness, target.sized(case)):
        assert comparison.passed, comparison
