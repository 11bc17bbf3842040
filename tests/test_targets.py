"""Targets outside [0, V) never cause accesses out of bounds: an error where values are checked, otherwise NaN."""

from typing import Any

import numpy as np
import pytest

import xent
from tests.cases import FUNCTIONS
from tests.covering import crossed
from tests.targets import Target

LOGITS = np.random.default_rng(0).normal(size=(2, 3, 5))
HIDDEN = np.random.default_rng(1).normal(size=(2, 3, 4))
CLASSIFIER = np.random.default_rng(2).normal(size=(5, 4))


def losses(target: Target, classes: np.ndarray, **options: object) -> list[object]:
    logits, hidden, classifier, wrong = target.arrays(LOGITS, HIDDEN, CLASSIFIER, classes)
    losses = [
        lambda: xent.cross_entropy(logits, wrong, backend=target.name, **options),
        lambda: xent.linear_cross_entropy(hidden, classifier, wrong, backend=target.name, **options),
    ]
    if options:
        return losses
    return [
        *losses,
        lambda: xent.log_probs(logits, wrong, backend=target.name),
        lambda: xent.linear_log_probs(hidden, classifier, wrong, backend=target.name),
    ]


@pytest.mark.parametrize("value", [5, 6, -1, -99, 2**31 - 1, 2**40, -(2**40), 2**63 - 1])
@pytest.mark.parametrize("weighted", [False, True])
def test_index_error_names_value_position_and_range(
    target: Target, value: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = np.array([[0, 1, 2], [-100, value, 3]])
    options = {"weight": target.arrays(np.ones(5))[0]} if weighted else {}
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    for loss in losses(target, classes, **options):
        with pytest.raises(IndexError, match=rf"target\[1, 1\] is {value}; classes are 0 to 4"):
            loss()


@pytest.mark.parametrize(("dtype", "value"), [("uint8", 156), ("int8", -56), ("int16", 30_000)])
def test_narrow_integer_targets_are_not_wrapped(
    target: Target, dtype: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 8 bits, ignore_index=-100 would be 156, and 200 classes would be -56."""
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    logits, classes, wrong = target.arrays(
        np.zeros((2, 200 if dtype == "int8" else 50)), np.array([3, 4], dtype), np.array([3, value], dtype)
    )
    assert float(xent.cross_entropy(logits, classes, backend=target.name)) == pytest.approx(np.log(logits.shape[1]))
    with pytest.raises(IndexError, match=rf"target\[1\] is {value}; classes are 0 to"):
        xent.cross_entropy(logits, wrong, backend=target.name)


@pytest.mark.parametrize("ignore_index", [-100, 0, 5, 37, 255])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64"])
def test_any_number_is_ignored_in_any_dtype(target: Target, dtype: str, ignore_index: int) -> None:
    """Also one that the dtype cannot hold."""
    rng = np.random.default_rng(1)
    values, classes = rng.normal(size=(3, 5, 37)), rng.integers(0, 37, (3, 5)).astype(dtype)
    if np.iinfo(dtype).min <= ignore_index <= np.iinfo(dtype).max:
        classes[1:, ::2] = ignore_index
    logits, placed = target.arrays(values, classes)
    loss, (gradient,) = target.harness.gradients(
        lambda z: xent.cross_entropy(z, placed, ignore_index=ignore_index, backend=target.name), (logits,), None
    )
    expected = xent.cross_entropy(values, classes, ignore_index=ignore_index)
    target.close(loss, expected, rtol=1e-6)
    left = np.abs(target.harness.numpy(gradient)).sum(-1) > 0
    np.testing.assert_array_equal(left, classes.astype(int) != ignore_index)


def test_index_error_of_a_single_row(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    for arrays in (target.arrays(LOGITS[0, 0], np.array(-1)), (LOGITS[0, 0], np.array(-1))):
        with pytest.raises(IndexError, match=r"^target is -1; classes are 0 to 4, or ignore_index=-100$"):
            xent.cross_entropy(*arrays)


@pytest.mark.parametrize(
    *crossed(
        function=FUNCTIONS,
        value=[5, -1, 2**31 - 1, 2**40, -(2**40)],
        reduction=["mean", "sum", "none"],
        options=[{}, {"weight": np.linspace(0.5, 1, 5)}, {"sample_weight": np.array([[1, 2, 3], [1, 0, 1]]) / 2}],
        workspace=[None, 5 * 4 * 2],
    )
)
def test_unchecked_invalid_targets_give_nan_in_their_row(
    target: Target, function: str, value: int, reduction: str, options: dict[str, Any], workspace: int | None
) -> None:
    """A weight of 0 does not hide them. They change neither the gradients of other rows nor what needs no target."""
    classes, bad = np.array([[0, 1, 2], [-100, value, 3]]), np.zeros((2, 3), bool)
    bad[1, 1] = True
    placed = {name: target.arrays(array)[0] for name, array in options.items()}
    if target.looks_at_targets:
        for loss in losses(target, classes, **placed):
            with pytest.raises(IndexError):
                loss()
        return
    *sources, wrong, right = target.arrays(
        *((LOGITS,) if function == "cross_entropy" else (HIDDEN, CLASSIFIER)), classes, np.where(bad, 1, classes)
    )
    chunks = {"workspace": workspace} if function == "linear_cross_entropy" else {}
    kinds = {"reduction": reduction, "backend": target.name} | placed | chunks
    (ones,) = target.arrays(np.ones((2, 3)) if reduction == "none" else np.array(1.0))
    (loss, (gradient, *_)), (_, (expected, *_)) = (
        target.harness.gradients(lambda *z, y=y: getattr(xent, function)(*z, y, **kinds), tuple(sources), ones)
        for y in (wrong, right)
    )
    gradient, expected = target.harness.numpy(gradient), target.harness.numpy(expected)
    np.testing.assert_array_equal(np.isnan(gradient).all(-1), bad)
    assert np.isfinite(gradient[~bad]).all()
    if reduction != "mean" or "sample_weight" in options:
        np.testing.assert_array_equal(gradient[~bad], expected[~bad])
    if reduction == "none":
        np.testing.assert_array_equal(np.isnan(target.harness.numpy(loss)), bad)
    _, stats = getattr(xent, function)(*sources, wrong, stats=("nll", "lse", "entropy", "accuracy"), **kinds)
    np.testing.assert_array_equal(np.isnan(target.harness.numpy(stats.nll)), bad)
    assert np.isfinite(target.harness.numpy(stats.lse)).all()
    assert np.isfinite(target.harness.numpy(stats.entropy)).all()
    assert 0 <= float(stats.accuracy) <= 4 / 5


@pytest.mark.parametrize("reference", [True, False])
def test_position_is_the_callers_and_unused_targets_do_not_matter(
    target: Target, reference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    arrays = (HIDDEN, CLASSIFIER, np.array([[0, 1, 2], [0, 3, 77]]), np.array([[77, 1, 2], [0, 3, 4]]))
    hidden, classifier, wrong, unused = arrays if reference else target.arrays(*arrays)
    with pytest.raises(IndexError, match=r"target\[1, 2\] is 77; classes are 0 to 4, or ignore_index=-100"):
        xent.linear_cross_entropy(hidden, classifier, wrong, shift=1)
    assert float(xent.linear_cross_entropy(hidden, classifier, unused, shift=1)) > 0
    with pytest.raises(IndexError, match=r"target\[1, 2\] is 77; classes are 0 to 4, or ignore_index=-100"):
        xent.linear_log_probs(hidden, classifier, wrong, shift=1)
    assert xent.linear_log_probs(hidden, classifier, unused, shift=1).sum() < 0


def test_uint64_targets_beyond_int64_are_not_ignored() -> None:
    with pytest.raises(IndexError, match="18446744073709551516"):
        xent.cross_entropy(np.zeros((1, 3)), np.array([2**64 - 100], dtype=np.uint64))
