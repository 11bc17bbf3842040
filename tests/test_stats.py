"""Every statistic on every backend equals the reference's; requesting one does not change other results."""

from dataclasses import fields, replace
from itertools import cycle

import numpy as np
import pytest

import xent
from tests.calls import WITHOUT_RANK, call_of
from tests.cases import EVERYWHERE, FUNCTIONS, LOG_PROBS, SHAPES, covering_cases
from tests.covering import FULL, crossed
from tests.options import LOG_PROB_OPTIONS, option_cases
from tests.targets import Target
from xent.command.check.case import Case, make_inputs
from xent.core.spec import DIFFERENTIABLE, STAT_NAMES

CASES = [
    case
    for function in FUNCTIONS
    for case in [
        *(
            replace(case, workspace=workspace)
            for case, workspace in zip(
                covering_cases(function, "float32"), cycle((None, 1, 67 * 4 * 3, 100)), strict=False
            )
        ),
        *(option_cases(function, "float32") if FULL else []),
        *(
            replace(SHAPES[name], function=function, dtype="float32", name=name)
            for name in ("no rows", "one class", "every target ignored")
        ),
        Case(function, (0,), 11, "float32", "probabilities, no rows", {"probabilities": True}),
    ]
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_statistics_equal_the_reference(target: Target, case: Case) -> None:
    compare_rows(target.sized(case), target)


def compare_rows(case: Case, target: Target, close: float = 3e-6) -> None:
    """Compare all statistics with the reference, and log-probabilities. Loss and log-probabilities do not change.

    The last bits of a linear loss may: with statistics Triton compiles another kernel for it.
    """
    inputs, names = make_inputs(case), STAT_NAMES if case.function in FUNCTIONS else WITHOUT_RANK
    call, arrays = call_of(target, case, inputs, stats=names)
    *made, stats = call(*arrays)
    numbers = {name: target.harness.numpy(array) for name, array in zip(inputs.differentiable, arrays, strict=True)}
    *right, expected = getattr(xent, case.function)(
        **numbers, target=inputs.target, **inputs.options, **(case.keywords | {"stats": names})
    )
    plain = call_of(target, case, inputs, stats=())[0](*arrays)
    for one, alone, other in zip(made, plain if isinstance(plain, tuple) else (plain,), right, strict=True):
        differs = target.name == "triton" and target.device == "cuda" and case.function == "linear_cross_entropy"
        target.close(one, alone, rtol=2.0**-21 if differs else 0, atol=0)
        if case.function in LOG_PROBS:
            target.close(one, other, rtol=5e-6, atol=5e-6)
    assert {field.name for field in fields(stats) if getattr(stats, field.name) is not None} == {*names}
    for name in names:
        found, truth = target.harness.numpy(getattr(stats, name)), np.asarray(getattr(expected, name))
        assert found.shape == truth.shape, name
        if name in ("predictions", "count"):
            np.testing.assert_array_equal(found, truth, err_msg=name)
        else:
            # The mean is taken of differences from the largest logit, whose size the log-sum-exp has. Tiles round it.
            scale = expected.lse if name == "mean_logit" and case.workspace is not None else truth
            size = max(1, np.abs(scale).max(initial=0))
            np.testing.assert_allclose(found, truth, rtol=close, atol=close * size, err_msg=name)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", STAT_NAMES)
def test_only_requested_statistics_are_returned(target: Target, function: str, name: str) -> None:
    case = Case(function, (6,), 9, "float32", "")
    call, arrays = call_of(target, case, make_inputs(case), stats=[name, name])
    _, stats = call(*arrays)
    _, every = call_of(target, case, make_inputs(case), stats={*STAT_NAMES})[0](*arrays)
    found, expected = (target.harness.numpy(getattr(some, name)) for some in (stats, every))
    np.testing.assert_array_equal(found, expected)
    assert isinstance(stats, xent.Stats)
    assert [field.name for field in fields(stats) if getattr(stats, field.name) is not None] == [name]


def test_ties_of_logits_or_of_the_softcap_go_to_the_lowest_class(target: Target) -> None:
    logits, classes = target.arrays(np.array([[1.0, 3.0, 3.0], [400.0, 900.0, 100.0]]), np.array([1, 1]))
    _, stats = xent.cross_entropy(logits, classes, softcap=2.0, stats=("predictions",), backend=target.name)
    target.same(stats.predictions, [1, 1])


@pytest.mark.parametrize("vocabulary", [20_000, 20_001])
def test_ties_far_apart_go_to_the_lowest_class(target: Target, vocabulary: int) -> None:
    """Equal maxima at the same position of different blocks of a kernel."""
    values = np.zeros((2, vocabulary))
    values[0, [5, 8197, 16389]] = 1.0
    values[1, [7, 100, 16384]] = -1.0
    logits, classes = target.arrays(values, np.array([5, 8197]))
    _, stats = xent.cross_entropy(logits, classes, stats=("predictions", "accuracy"), backend=target.name)
    target.same(stats.predictions, [5, 0])
    assert float(stats.accuracy) == 0.5


@pytest.mark.parametrize(("logit_scale", "expected"), [(2.0, [2, 0]), (-2.0, [1, 2]), (0.0, [0, 0])])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_scale_orders_predictions(target: Target, function: str, logit_scale: float, expected: list[int]) -> None:
    logits, unit, classes = target.arrays(np.array([[1.0, 0.0, 3.0], [4.0, 2.0, 1.0]]), np.eye(3), np.array([1, 1]))
    arrays = (logits, classes) if function == "cross_entropy" else (logits, unit, classes)
    _, stats = getattr(xent, function)(*arrays, logit_scale=logit_scale, stats=("predictions",), backend=target.name)
    target.same(stats.predictions, expected)


@pytest.mark.parametrize(("dtype", "largest"), [("bfloat16", 256.0), ("float16", 2048.0), ("float32", 256.0)])
def test_rounding_of_a_probable_target_does_not_affect_the_entropy(target: Target, dtype: str, largest: float) -> None:
    """The target's logit is 288.75, rounded to 288 in bfloat16, which would change its probability a lot."""
    weight = np.zeros((9, 3))
    weight[4] = largest, 32.0, 0.75
    hidden, classifier, classes = target.arrays(np.ones((2, 3)), weight, np.array([4, 4]), dtype=dtype)
    found = []

    def call(source: object) -> object:
        loss, stats = xent.linear_cross_entropy(
            source, classifier, classes, label_smoothing=0.5, stats=("entropy", "nll"), backend=target.name
        )
        found.extend([stats.entropy, stats.nll])
        return loss

    loss, _ = target.harness.gradients(call, (hidden,), None)
    for values in found[:2]:
        target.close(values, 0, atol=1e-6)
    target.close(loss, weight[4].sum() * 0.5 * 8 / 9, rtol=1e-4)


@pytest.mark.parametrize(*crossed(dtype=["bfloat16", "float16"], reduction=["mean", "none"], trained=[True, False]))
@pytest.mark.parametrize("options", [{}, {"probabilities": True}, {"bias": True}], ids=str)
def test_reported_numbers_come_from_unrounded_logits(
    target: Target, dtype: str, reduction: str, trained: bool, options: dict[str, bool]
) -> None:
    """Logits near 50: rounded to bfloat16 they would have errors of 0.1."""
    rng = np.random.default_rng(0)
    hidden, classifier = rng.normal(size=(6, 32)), 9 * rng.normal(size=(67, 32))
    classes = rng.dirichlet(np.ones(67), 6) if "probabilities" in options else rng.integers(67, size=6)
    given = (hidden, classifier, *((rng.normal(size=67),) if "bias" in options else ()))
    arrays = target.arrays(*given, dtype=dtype)
    (placed,) = target.arrays(classes, dtype="float32")
    numbers = [target.harness.numpy(array) for array in arrays]
    names = ("input", "linear_weight", "linear_bias")
    stats = ("lse", "nll", "entropy")
    exact = xent.linear_cross_entropy(
        **dict(zip(names, numbers, strict=False)), target=classes, reduction=reduction, stats=stats
    )[1]
    reported = []

    def call(*sources: object) -> object:
        named = dict(zip(names, sources, strict=False))
        loss, found = xent.linear_cross_entropy(
            **named, target=placed, reduction=reduction, stats=stats, backend=target.name
        )
        reported.append(found)
        return loss

    if trained:
        (upstream,) = target.arrays(np.ones(6 if reduction == "none" else ()))
        target.harness.gradients(call, arrays, upstream)
    else:
        call(*arrays)
    for name in stats:
        found = target.harness.numpy(getattr(reported[0], name))
        np.testing.assert_allclose(found, getattr(exact, name), rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("function", [*FUNCTIONS, *LOG_PROBS])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_other_statistics_carry_no_gradient(target: Target, function: str, reduction: str) -> None:
    """Statistics with gradients, per row and with reduction "none", are in the matrix."""
    is_loss = function in FUNCTIONS
    if not is_loss and reduction != "none":
        return
    case = Case(function, (6,), 9, "float32", "", {"z_loss": 0.1} if is_loss else {}, reduction)
    inputs = make_inputs(case)
    names = [name for name in (STAT_NAMES if is_loss else WITHOUT_RANK) if name not in ("predictions", "count")]
    if reduction == "none":
        names = [name for name in names if name not in DIFFERENTIABLE]
    call, arrays = call_of(target, case, inputs)
    with_stats, _ = call_of(target, case, inputs, stats=names)

    def leaky(*differentiable: object) -> object:
        loss, stats = with_stats(*differentiable)
        return loss + sum(3 * getattr(stats, name).sum() for name in names)

    (upstream,) = target.arrays(np.ones(6)) if reduction == "none" else (None,)
    plain, leaked = (target.harness.gradients(some, arrays, upstream)[1] for some in (call, leaky))
    for one, other in zip(plain, leaked, strict=True):
        target.same(one, other)


@pytest.mark.parametrize(
    *crossed(
        function=LOG_PROBS,
        options=LOG_PROB_OPTIONS,
        dtype=EVERYWHERE,
        vocabulary=[1, 67, 33_003],
        workspace=[None, 67 * 4 * 5],
    )
)
def test_results_of_log_probabilities_equal_the_reference(
    target: Target, function: str, options: str, dtype: str, vocabulary: int, workspace: int | None
) -> None:
    loop = {"bias": True, "shift": 2, "workspace": workspace} if function == "linear_log_probs" else {}
    case = Case(function, (4, 5), vocabulary, dtype, "", LOG_PROB_OPTIONS[options], "none", entropy=True, **loop)
    compare_rows(target.sized(case), target)


def test_ties_among_the_classes_of_a_support(target: Target) -> None:
    """Among equal logits the lowest class counts, for any order of ids."""
    ids, offsets = np.array([3, 1, 4, 0, 2]), np.array([0, 3, 5])
    logits, classes = target.arrays(np.array([[9.0, 1.0, 9.0, 1.0, 0.0], [2.0, 3.0, 2.0, 3.0, 3.0]]), np.array([1, 2]))
    _, stats = xent.log_probs(
        logits,
        classes,
        support=xent.Support(*target.arrays(ids, offsets)),
        stats=("predictions", "accuracy"),
        backend=target.name,
    )
    target.same(stats.predictions, [1, 0])
    target.same(stats.accuracy, [1.0, 0.0])
