"""Every statistic, on every backend, is the reference's; asking for one changes nothing else."""

from dataclasses import fields, replace

import numpy as np
import pytest

import xent
from tests.cases import FUNCTIONS, SHAPES
from tests.targets import Target
from tests.test_promises import call_of
from xent.core.check.cases import Case, make_inputs, option_cases
from xent.core.spec import STAT_NAMES

CASES = [
    case
    for function in FUNCTIONS
    for case in [
        *option_cases(function, "float32"),
        *(
            replace(SHAPES[name], function=function, dtype="float32", name=name)
            for name in ("no rows", "one class", "every target ignored")
        ),
        Case(function, (0,), 11, "float32", "probabilities, no rows", {"probabilities": True}),
    ]
    if "smoothing" not in case.name
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_statistics_are_the_references(target: Target, case: Case) -> None:
    case = target.sized(case)
    inputs = make_inputs(case)
    call, arrays = call_of(target, case, inputs, stats=STAT_NAMES)
    loss, stats = call(*arrays)
    numbers = {name: target.harness.numpy(array) for name, array in zip(inputs.differentiable, arrays, strict=True)}
    shift = {"shift": case.shift} if case.function == "linear_cross_entropy" else {}
    _, expected = getattr(xent, case.function)(
        **numbers, target=inputs.target, reduction=case.reduction, stats=STAT_NAMES, **inputs.options, **shift
    )
    plain_call, _ = call_of(target, case, inputs)
    np.testing.assert_array_equal(target.harness.numpy(loss), target.harness.numpy(plain_call(*arrays)))
    for name in STAT_NAMES:
        found, truth = target.harness.numpy(getattr(stats, name)), np.asarray(getattr(expected, name))
        assert found.shape == truth.shape, name
        if name in ("predictions", "count"):
            np.testing.assert_array_equal(found, truth, err_msg=name)
        else:
            np.testing.assert_allclose(
                found, truth, rtol=3e-6, atol=3e-6 * max(1, np.abs(truth).max(initial=0)), err_msg=name
            )


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", STAT_NAMES)
def test_only_what_is_asked_for_is_there(target: Target, function: str, name: str) -> None:
    case = Case(function, (6,), 9, "float32", "")
    call, arrays = call_of(target, case, make_inputs(case), stats=[name])
    _, stats = call(*arrays)
    assert isinstance(stats, xent.Stats)
    assert [field.name for field in fields(stats) if getattr(stats, field.name) is not None] == [name]


def test_ties_go_to_the_lowest_class_even_where_the_softcap_makes_them(target: Target) -> None:
    logits, classes = target.arrays(np.array([[1.0, 3.0, 3.0], [400.0, 900.0, 100.0]]), np.array([1, 1]))
    _, stats = xent.cross_entropy(logits, classes, softcap=2.0, stats=("predictions",), backend=target.name)
    np.testing.assert_array_equal(target.harness.numpy(stats.predictions), [1, 1])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_statistics_carry_no_gradient(target: Target, function: str, reduction: str) -> None:
    case = Case(function, (6,), 9, "float32", "", {"z_loss": 0.1}, reduction=reduction)
    inputs = make_inputs(case)
    call, arrays = call_of(target, case, inputs)
    with_stats, _ = call_of(target, case, inputs, stats=("lse", "z_loss"))

    def leaky(*differentiable: object) -> object:
        loss, stats = with_stats(*differentiable)
        return loss + 3 * stats.lse.sum() + stats.z_loss.sum()

    plain = target.harness.gradients(call, arrays, None if reduction == "mean" else target.arrays(np.ones(6))[0])[1]
    leaked = target.harness.gradients(leaky, arrays, None if reduction == "mean" else target.arrays(np.ones(6))[0])[1]
    for one, other in zip(plain, leaked, strict=True):
        np.testing.assert_array_equal(target.harness.numpy(one), target.harness.numpy(other))
