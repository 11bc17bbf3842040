"""One test per promise of the documentation, on every backend."""

from typing import Any

import numpy as np
import pytest

import xent
from tests.calls import call_of
from tests.cases import FUNCTIONS
from tests.covering import crossed
from tests.options import option_cases
from tests.targets import Target
from xent.command.check.case import Case, make_inputs

RNG = np.random.default_rng(0)


def results(target: Target, case: Case, seed: int = 0, **more: Any) -> list[Any]:
    """Return loss and gradients as NumPy arrays."""
    inputs = make_inputs(case, seed)
    call, arrays = call_of(target, case, inputs, **more)
    loss, gradients = target.harness.gradients(call, arrays, target.arrays(np.asarray(inputs.upstream))[0])
    return [target.harness.numpy(array) for array in (loss, *gradients)]


def some_cases(function: str) -> list[Case]:
    return [case for case in option_cases(function, "float32") if case.name in ("plain", "all", "probabilities, all")]


SOME = [case for function in FUNCTIONS for case in some_cases(function)]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_inputs_are_never_written_to(target: Target, case: Case) -> None:
    case = target.sized(case)
    inputs = make_inputs(case)
    call, arrays = call_of(target, case, inputs)
    before = [target.harness.numpy(array).copy() for array in arrays]
    target.harness.gradients(call, arrays, target.arrays(np.asarray(inputs.upstream))[0])
    for array, values in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(target.harness.numpy(array), values)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_bitwise_the_same_run_after_run(target: Target, case: Case) -> None:
    case = target.sized(case)
    first, second = results(target, case), results(target, case)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    *crossed(
        vocabulary=[1, 2, 67, 4099, 33_003, 70_001],
        dtype=["float32", "bfloat16"],
        options=[{}, {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0}],
    )
)
def test_row_does_not_depend_on_its_batch(target: Target, vocabulary: int, dtype: str, options: dict[str, Any]) -> None:
    logits, classes = target.arrays(RNG.normal(size=(9, vocabulary)), RNG.integers(0, vocabulary, 9), dtype=dtype)
    options = options | {"reduction": "none", "backend": target.name, "stats": ("lse", "nll", "entropy")}
    loss, stats = xent.cross_entropy(logits, classes, **options)
    for rows in (slice(4, 5), slice(3, 6), slice(0, 8)):
        some, some_stats = xent.cross_entropy(logits[rows], classes[rows], **options)
        for whole, part in (
            (loss, some),
            (stats.lse, some_stats.lse),
            (stats.nll, some_stats.nll),
            (stats.entropy, some_stats.entropy),
        ):
            np.testing.assert_array_equal(target.harness.numpy(whole[rows]), target.harness.numpy(part))


@pytest.mark.parametrize(
    *crossed(
        function=FUNCTIONS,
        reduction=["mean", "sum", "none"],
        hidden=[np.nan, np.inf, -np.inf],
        stats=[(), ("count",), ("lse", "z_loss")],
    )
)
def test_values_of_ignored_rows_have_no_effect(
    target: Target, function: str, reduction: str, hidden: float, stats: tuple[str, ...]
) -> None:
    case = Case(function, (6,), 9, "float32", "", reduction=reduction, ignored=0.0)
    clean = make_inputs(case)
    chunks = {"workspace": 3 * 9 * 4} if stats and function == "linear_cross_entropy" else {}
    for how in ("ignore_index", "sample_weight"):
        inputs = make_inputs(case)
        if how == "ignore_index":
            inputs.target[2] = clean.target[2] = -100
        else:
            clean.options["sample_weight"] = inputs.options["sample_weight"] = np.array([1.0, 2.0, 0.0, 1.0, 0.5, 1.0])
        first = next(iter(inputs.differentiable))
        inputs.differentiable[first][2] = hidden
        upstream = target.arrays(np.asarray(inputs.upstream))[0]
        outcome = []
        for drawn in (clean, inputs):
            call, arrays = call_of(target, case, drawn, stats=stats, **chunks)
            loss_only = (lambda *given, call=call: call(*given)[0]) if stats else call
            loss, gradients = target.harness.gradients(loss_only, arrays, upstream)
            share = [call(*arrays)[1].z_loss] if "z_loss" in stats else []
            outcome.append([target.harness.numpy(array) for array in (loss, *gradients, *share)])
        for expected, found in zip(*outcome, strict=True):
            # Not bit for bit: exp of a vector register that also holds a NaN may round its other lanes differently.
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
        assert (outcome[1][1][2] == 0).all()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "nothing",
    [
        {"ignored": 2.0},
        {"rows": (0,)},
        {"rows": (2, 0)},
        {"options": {"normalizer": 0.0}},
        {"options": {"weight": "zero"}},
        {"options": {"sample_weight": "zero"}},
    ],
    ids=str,
)
def test_nothing_to_average_is_zero_with_zero_gradients(
    target: Target, function: str, reduction: str, nothing: dict[str, Any]
) -> None:
    if "normalizer" in str(nothing):
        reduction = "mean"
    case = Case(
        function, **({"rows": (4,), "vocabulary": 5, "dtype": "float32", "name": "", "reduction": reduction} | nothing)
    )
    if "weight" in str(nothing):
        name = next(iter(case.options))
        drawn = make_inputs(Case(function, (4,), 5, "float32", "", reduction=reduction))
        drawn.options[name] = np.zeros(5 if name == "weight" else 4)
    else:
        drawn = make_inputs(case)
    if reduction == "mean" or nothing != {"options": {"weight": "zero"}}:
        # If all class weights are 0, a sum or a row is 0 times its value.
        next(iter(drawn.differentiable.values()))[:1] = np.nan
    call, arrays = call_of(target, case, drawn)
    loss, gradients = target.harness.gradients(call, arrays, target.arrays(np.asarray(drawn.upstream))[0])
    loss = target.harness.numpy(loss)
    assert loss.shape == (case.rows if reduction == "none" else ())
    assert (loss == 0).all()
    for array, gradient in zip(arrays, gradients, strict=True):
        assert tuple(gradient.shape) == tuple(array.shape)
        assert (target.harness.numpy(gradient) == 0).all()


@pytest.mark.parametrize(
    "options",
    [{}, {"z_loss": 0.1}, {"weight": True}, {"weight": True, "label_smoothing": 0.1}, {"probabilities": True}],
    ids=str,
)
@pytest.mark.parametrize("columns", [1, 3, 8])
def test_leading_columns_of_minus_infinity(target: Target, options: dict[str, Any], columns: int) -> None:
    """Classes with a logit of -inf (a padded or masked vocabulary) have probability 0 and gradient 0."""
    case = Case("cross_entropy", (6,), 11, "float32", "", options, ignored=0.0)
    inputs = make_inputs(case)
    inputs.differentiable["logits"][:, :columns] = -np.inf
    if "probabilities" in options:
        inputs.target[:, :columns] = 0.0
    else:
        inputs.target[:] = np.maximum(inputs.target, columns)
    if "weight" in inputs.options:
        inputs.options["weight"] += 0.1
        inputs.options["weight"][:columns] = 0.0
    call, arrays = call_of(target, case, inputs)
    loss, (gradient,) = target.harness.gradients(call, arrays, None)
    expected = xent.cross_entropy(target.harness.numpy(arrays[0]), inputs.target, **inputs.options)
    np.testing.assert_allclose(target.harness.numpy(loss), expected, rtol=1e-6)
    gradient = target.harness.numpy(gradient)
    assert (gradient[:, :columns] == 0).all()
    assert np.isfinite(gradient).all()
    assert np.abs(gradient[:, columns:]).sum() > 0


def test_row_of_minus_infinity(target: Target) -> None:
    """A row of -inf has no probabilities, but its log-sum-exp is log 0, as in every framework's own logsumexp."""
    values = np.array([[-np.inf, -np.inf, -np.inf], [0.0, 1.0, 2.0]])
    logits, classes = target.arrays(values, np.array([1, 1]))
    loss, stats = xent.cross_entropy(logits, classes, reduction="none", stats=("lse", "nll"), backend=target.name)
    _, reference = xent.cross_entropy(values, np.array([1, 1]), stats=("lse",))
    lse, nll = target.harness.numpy(stats.lse), target.harness.numpy(stats.nll)
    assert lse[0] == reference.lse[0] == -np.inf
    assert np.isnan(nll[0])
    np.testing.assert_allclose(lse, reference.lse, rtol=1e-6)
    np.testing.assert_allclose(lse[1], np.log(np.exp(values[1]).sum()), rtol=1e-6)
    np.testing.assert_array_equal(np.isnan(target.harness.numpy(loss)), [True, False])


def test_impossible_target_has_infinite_loss_and_finite_gradient(target: Target) -> None:
    values = np.array([[0.0, -np.inf, 1.0], [0.0, 1.0, 2.0]])
    logits, classes = target.arrays(values, np.array([1, 1]))
    loss, (gradient,) = target.harness.gradients(
        lambda z: xent.cross_entropy(z, classes, reduction="sum", backend=target.name), (logits,), None
    )
    assert target.harness.numpy(loss) == np.inf
    np.testing.assert_allclose(target.harness.numpy(gradient)[0, 1], -1.0)


@pytest.mark.parametrize("case", [case for case in SOME if case.reduction == "none" and not case.shift], ids=str)
def test_masked_spans_with_reduction_none(target: Target, case: Case) -> None:
    """Rows with an upstream gradient of 0 have a gradient of exactly 0, and do not affect other rows."""
    case = target.sized(case)
    inputs = make_inputs(case)
    span = np.zeros(case.rows, bool)
    span.reshape(-1)[span.size // 5 : span.size * 5 // 8] = True
    call, arrays = call_of(target, case, inputs)
    masked, whole = (
        target.harness.gradients(call, arrays, target.arrays(np.where(off, 0.0, inputs.upstream))[0])[1][0]
        for off in (span, np.zeros_like(span))
    )
    masked, whole = target.harness.numpy(masked), target.harness.numpy(whole)
    assert (masked[span] == 0).all()
    np.testing.assert_array_equal(masked[~span], whole[~span])


def test_shift_equals_slicing(target: Target) -> None:
    rng = np.random.default_rng(3)
    hidden, classifier = target.arrays(rng.normal(size=(3, 9, 8)), rng.normal(size=(21, 8)))
    (labels,) = target.arrays(np.where(rng.random((3, 9)) < 0.3, -100, rng.integers(0, 21, (3, 9))))
    for shift in (0, 1, 2, 8, 9, 10, 20):
        kept = max(9 - shift, 0)
        shifted = xent.linear_cross_entropy(hidden, classifier, labels, shift=shift, backend=target.name)
        sliced = xent.linear_cross_entropy(hidden[:, :kept], classifier, labels[:, shift:], backend=target.name)
        np.testing.assert_allclose(target.harness.numpy(shifted), target.harness.numpy(sliced), rtol=1e-6)
        rows = xent.linear_cross_entropy(hidden, classifier, labels, shift=shift, reduction="none", backend=target.name)
        assert tuple(rows.shape) == (3, 9)
        assert (target.harness.numpy(rows)[:, kept:] == 0).all()
