"""The matrix on every backend: loss and all gradients against the reference, within bounds from unfused rounding."""

import numpy as np
import pytest

import xent
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
        options=["all", "probabilities, all, shift"],
        reduction=["mean", "sum", "none"],
    )
)
def test_workspace_changes_nothing_but_rounding(
    target: Target, dtype: str, workspace: int, options: str, reduction: str
) -> None:
    cases = option_cases("linear_cross_entropy", dtype)
    (case,) = (case for case in cases if (case.name, case.reduction) == (options, reduction))
    for comparison in judge_case(target.backend, target.harness, target.sized(case), workspace=workspace):
        assert comparison.passed, comparison


@pytest.mark.parametrize("case", INPLACE, ids=str)
def test_inplace_gives_the_same_gradient(target: Target, case: Case) -> None:
    inputs = make_inputs(target.sized(case))
    (logits,) = target.arrays(inputs.differentiable["logits"], dtype=case.dtype)
    options = {
        name: target.arrays(value)[0] if isinstance(value, np.ndarray) else value
        for name, value in inputs.options.items()
    }
    options["reduction"], options["target"] = case.reduction, target.arrays(inputs.target)[0]
    (upstream,) = target.arrays(np.asarray(inputs.upstream))
    results = [
        target.harness.gradients(
            lambda z, inplace=inplace: xent.cross_entropy(z * 1, inplace=inplace, **options), (logits,), upstream
        )
        for inplace in (False, True)
    ]
    (loss, (grad,)), (loss_inplace, (grad_inplace,)) = results
    np.testing.assert_array_equal(target.harness.numpy(loss), target.harness.numpy(loss_inplace))
    np.testing.assert_array_equal(target.harness.numpy(grad), target.harness.numpy(grad_inplace))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_each_row_has_the_gradient_of_a_sum(target: Target, dtype: str) -> None:
    """A row's log-sum-exp is that of the logits that its gradient is computed from, also if they are rounded."""
    if not target.takes(dtype):
        return
    rng = np.random.default_rng(0)
    weight, classes = rng.standard_normal((257, 64)), rng.integers(0, 257, 48)
    hidden = 0.3 * rng.standard_normal((48, 64)) + 0.03 * weight[classes]
    arrays = target.arrays(hidden, weight, dtype=dtype)
    (labels,) = target.arrays(classes)
    exact = [target.harness.numpy(array).astype(np.float64) for array in arrays]
    logits = exact[0] @ exact[1].T
    slope = np.exp(logits - logits.max(1, keepdims=True))
    slope /= slope.sum(1, keepdims=True)
    slope[np.arange(48), classes] -= 1
    truth = slope @ exact[1], slope.T @ exact[0]
    errors = []
    for reduction, upstream in (("sum", np.ones(())), ("none", np.ones(48))):
        _, made = target.harness.gradients(
            lambda h, w, reduction=reduction: xent.linear_cross_entropy(
                h, w, labels, reduction=reduction, backend=target.name
            ),
            arrays,
            target.arrays(upstream)[0],
        )
        errors.append([np.linalg.norm(target.harness.numpy(one) - true) for one, true in zip(made, truth, strict=True)])
    assert errors[1][0] <= 1.2 * errors[0][0], errors
    assert errors[1][1] <= 1.2 * errors[0][1], errors
