"""Targets outside [0, V) never cause accesses out of bounds: an error where values are checked, otherwise NaN."""

import numpy as np
import pytest

import xent
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


def test_index_error_of_a_single_row(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    for arrays in (target.arrays(LOGITS[0, 0], np.array(-1)), (LOGITS[0, 0], np.array(-1))):
        with pytest.raises(IndexError, match=r"^target is -1; classes are 0 to 4, or ignore_index=-100$"):
            xent.cross_entropy(*arrays)


def test_reference_raises_the_same(target: Target) -> None:
    with pytest.raises(IndexError, match=r"target\[1, 1\] is 7; classes are 0 to 4"):
        xent.cross_entropy(LOGITS, np.array([[0, 1, 2], [-100, 7, 3]]))


@pytest.mark.parametrize("value", [5, -1, 2**31 - 1, 2**40, -(2**40)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_unchecked_invalid_targets_give_nan_in_their_row(
    target: Target, value: int, reduction: str, weighted: bool
) -> None:
    classes = np.array([[0, 1, 2], [-100, value, 3]])
    options = {"weight": target.arrays(np.linspace(0.5, 1, 5))[0]} if weighted else {}
    if target.looks_at_targets:
        for loss in losses(target, classes, **options):
            with pytest.raises(IndexError):
                loss()
        return
    (logits, wrong) = target.arrays(LOGITS, classes)
    (ones,) = target.arrays(np.ones((2, 3)) if reduction == "none" else np.array(1.0))
    loss, (gradient,) = target.harness.gradients(
        lambda z: xent.cross_entropy(z, wrong, reduction=reduction, backend=target.name, **options), (logits,), ones
    )
    gradient = target.harness.numpy(gradient)
    bad = np.zeros((2, 3), bool)
    bad[1, 1] = True
    assert np.isnan(gradient[bad]).all()
    assert np.isfinite(gradient[~bad]).all()
    if reduction == "none":
        np.testing.assert_array_equal(np.isnan(target.harness.numpy(loss)), bad)


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
