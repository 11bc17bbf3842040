"""The matrix on every backend: loss and all gradients against the reference, within bounds from unfused rounding."""

import numpy as np
import pytest

from tests.calls import results_of
from tests.cases import (
    DTYPES,
    EVERYWHERE,
    FUNCTIONS,
    LOG_PROBS,
    all_cases,
    log_prob_cases,
    paired_cases,
    shape_cases,
)
from tests.covering import crossed
from tests.options import option_cases
from tests.targets import Target
from xent.command.check.case import Case, make_inputs
from xent.command.check.judge import judge_case

CASES = [case for function in FUNCTIONS for dtype in DTYPES for case in all_cases(function, dtype)]
FEW = [case for function in (*FUNCTIONS, *LOG_PROBS) for case in paired_cases(function, EVERYWHERE)]
PAIRS = [case for function in (*FUNCTIONS, *LOG_PROBS) for dtype in DTYPES for case in paired_cases(function, (dtype,))]
INPLACE = all_cases("cross_entropy", "bfloat16") + shape_cases("cross_entropy", "float32")
INPLACE = [case for case in INPLACE if not case.trained]


def passes(target: Target, case: Case) -> None:
    if not target.takes(case.dtype):
        return
    for comparison in judge_case(target.backend, target.harness, target.sized(case)):
        assert comparison.passed, comparison
        assert comparison.bound < 0.5, "a zero gradient must not pass"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients(target: Target, case: Case) -> None:
    passes(target, case)


@pytest.mark.parametrize("case", [case for name in LOG_PROBS for case in log_prob_cases(name)] + FEW, ids=str)
def test_results_of_rows_and_gradients(target: Target, case: Case) -> None:
    passes(target, case)


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_results_of_rows_and_gradients_in_every_dtype(target: Target, case: Case) -> None:
    if not target.slow:
        passes(target, case)


@pytest.mark.parametrize(
    *crossed(
        dtype=DTYPES[1:],
        workspace=[1, 67 * 4 * 3, 67 * 4 * 20, 10**9],
        options=["all", "probabilities, all, shift", "all, bias, shift"],
        reduction=["mean", "sum", "none"],
    )
)
def test_workspace_changes_nothing_but_rounding(
    target: Target, dtype: str, workspace: int, options: str, reduction: str
) -> None:
    """Of a loss, and of log-probabilities with all options."""
    is_loss = options != "all, bias, shift"
    cases = option_cases("linear_cross_entropy" if is_loss else "linear_log_probs", dtype)
    wanted = (options, reduction if is_loss else "none")
    (case,) = (case for case in cases if (case.name, case.reduction) == wanted)
    target.judge(target.sized(case), workspace=workspace)


@pytest.mark.parametrize("case", INPLACE, ids=str)
def test_inplace_gives_the_same_gradient(target: Target, case: Case) -> None:
    case = target.sized(case)
    one, other = (results_of(target, case, make_inputs(case), inplace=inplace) for inplace in (False, True))
    for found, expected in zip(one, other, strict=True):
        np.testing.assert_array_equal(found, expected)
