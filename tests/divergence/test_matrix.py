"""The matrix of the divergences, on every backend: value and every gradient, against the float64 reference."""

import pytest

from tests.cases import DTYPES
from tests.divergence.cases import covering_divergences, divergence_cases
from tests.targets import Target
from xent.command.check.case import Case

FUNCTIONS = ("divergence", "linear_divergence")
CASES = [
    case
    for function in FUNCTIONS
    for dtype in DTYPES
    for case in (*divergence_cases(function, dtype), *covering_divergences(function, dtype))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_divergence_and_gradients(target: Target, case: Case) -> None:
    if not target.takes(case.dtype):
        return
    target.judge(target.sized(case))
