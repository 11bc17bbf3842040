"""`xent.top_k` and `xent.linear_top_k` equal the reference on every backend; so does the statistic "rank"."""

from typing import Any

import numpy as np
import pytest

import xent
from tests.covering import crossed
from tests.targets import Target

ACTIVATIONS: list[dict[str, Any]] = [{}, {"softcap": 2.0, "temperature": 0.7}, {"logit_scale": -0.5}]
DTYPES = ["float32", "bfloat16", "float16", "float64"]
BAD_K = [0, -1, 12, True, 2.0, None, "2"]


def compare(target: Target, teacher: Any, expected: Any, close: float = 1e-5) -> None:
    """Compare with the reference. Classes are the same, also among equal logits."""
    assert isinstance(teacher, xent.TopKTeacher)
    np.testing.assert_array_equal(target.numbers(teacher.ids), expected.ids)
    log_probs = target.numbers(teacher.log_probs)
    assert log_probs.shape == expected.log_probs.shape
    np.testing.assert_allclose(log_probs, expected.log_probs, rtol=close, atol=close)


def placed(target: Target, values: Any, dtype: str = "float32") -> tuple[Any, Any]:
    """Return values on the device, and what they are there in float64."""
    (array,) = target.arrays(np.asarray(values, np.float64), dtype=dtype)
    return array, np.asarray(target.numbers(array), np.float64)


@pytest.mark.parametrize(
    *crossed(
        size=[(1, 1), (7, 7), (50, 3), (515, 2), (2100, 129), (4096, 1), (6001, 64)],
        options=ACTIVATIONS,
        dtype=DTYPES,
        axis=[-1, 1],
    )
)
def test_classes_of_logits(
    target: Target, size: tuple[int, int], options: dict[str, Any], dtype: str, axis: int
) -> None:
    """Many logits are equal. K is the last axis, whatever the axis of the classes is."""
    if not target.takes(dtype):
        return
    classes, k = size
    shape = (2, 2, classes) if axis == -1 else (2, classes, 2)
    logits, numbers = placed(target, np.random.default_rng(0).normal(0, 2, shape).round(1), dtype)
    expected = xent.top_k(numbers, k, axis=axis, **options)
    assert expected.ids.shape == (2, 2, k)
    compare(target, xent.top_k(logits, k, axis=axis, backend=target.name, **options), expected)


@pytest.mark.parametrize(
    *crossed(k=[1, 5, 64, 700], options=ACTIVATIONS, dtype=DTYPES, bias=[False, True], workspace=[None, 1, 700 * 4 * 3])
)
def test_classes_of_hidden_states(
    target: Target, k: int, options: dict[str, Any], dtype: str, bias: bool, workspace: int | None
) -> None:
    """The factors are small integers, whose products are exact, also if they exceed the 16-bit dtype's precision."""
    if not target.takes(dtype):
        return
    rng = np.random.default_rng(0)
    shapes = {"input": (2, 3, 8), "linear_weight": (700, 8)} | ({"linear_bias": (700,)} if bias else {})
    pairs = {name: placed(target, rng.integers(-40, 40, shape), dtype) for name, shape in shapes.items()}
    arrays, numbers = ({name: pair[place] for name, pair in pairs.items()} for place in (0, 1))
    options = {"temperature": 100.0} | options
    teacher = xent.linear_top_k(**arrays, k=k, workspace=workspace, backend=target.name, **options)
    compare(target, teacher, xent.linear_top_k(**numbers, k=k, **options), 3e-5)


@pytest.mark.parametrize("k", [1, 3, 40, 2000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_whose_logits_are_equal_or_infinite(target: Target, k: int, dtype: str) -> None:
    z = np.zeros((6, 2000))
    z[1] = 3.5
    z[2] = -np.inf
    z[3], z[3, 1977] = -np.inf, 1.0  # one class is possible
    z[4, :1990] = -np.inf
    z[5, 5::7] = 2.0
    logits, numbers = placed(target, z, dtype)
    with np.errstate(invalid="ignore"):
        expected = xent.top_k(numbers, k)
    assert all(len(set(row)) == k for row in expected.ids)
    assert expected.log_probs[2].max() == -np.inf
    compare(target, xent.top_k(logits, k, backend=target.name), expected)


def test_rows_with_nan(target: Target) -> None:
    """Their log-probabilities are NaN, and their classes are classes, each once. Other rows do not change."""
    z = np.random.default_rng(0).normal(size=(5, 300))
    numbers = z.copy()
    numbers[1, 17], numbers[3], numbers[4, 200] = np.nan, np.nan, np.inf
    for k in (1, 7, 300):
        teacher = xent.top_k(*target.arrays(numbers), k, backend=target.name)
        ids, log_probs = target.numbers(teacher.ids), target.numbers(teacher.log_probs)
        np.testing.assert_array_equal(np.isnan(log_probs).all(-1), [False, True, False, True, True])
        assert all(len(set(row)) == k for row in ids)
        assert ids.min() >= 0
        assert ids.max() < 300
        expected = xent.top_k(z, k)
        np.testing.assert_array_equal(ids[[0, 2]], expected.ids[[0, 2]])


def test_a_scale_of_0(target: Target) -> None:
    """All classes are equal, and x = 0 z is NaN in a row with an infinite logit, as in the other functions."""
    z = np.random.default_rng(0).normal(size=(3, 300))
    z[1, 200], z[2, 7] = -np.inf, np.inf
    logits, numbers = placed(target, z)
    with np.errstate(invalid="ignore"):
        expected = xent.top_k(numbers, 5, logit_scale=0.0)
    np.testing.assert_array_equal(expected.ids[0], range(5))
    found = xent.top_k(logits, 5, logit_scale=0.0, backend=target.name)
    np.testing.assert_array_equal(target.numbers(found.ids)[0], range(5))
    np.testing.assert_allclose(target.numbers(found.log_probs), expected.log_probs, rtol=1e-5)
    np.testing.assert_array_equal(np.isnan(expected.log_probs), [[False] * 5, [True] * 5, [True] * 5])


def test_arguments_do_not_change_and_may_have_any_strides(target: Target) -> None:
    rng = np.random.default_rng(0)
    logits, hidden, weight = target.arrays(
        rng.normal(size=(3, 4, 50)), rng.normal(size=(3, 4, 8)), rng.normal(size=(50, 8))
    )
    copies = [target.numbers(array).copy() for array in (logits, hidden, weight)]
    views = logits[::2, 1:, ::3], hidden[::2, 1:, ::2], weight[::3, ::2]
    numbers = copies[0][::2, 1:, ::3], copies[1][::2, 1:, ::2], copies[2][::3, ::2]
    compare(target, xent.top_k(views[0], 4, backend=target.name), xent.top_k(numbers[0], 4))
    compare(target, xent.linear_top_k(*views[1:], 4, backend=target.name), xent.linear_top_k(*numbers[1:], 4))
    for array, copy in zip((logits, hidden, weight), copies, strict=True):
        np.testing.assert_array_equal(target.numbers(array), copy)


@pytest.mark.parametrize("rows", [(0,), (2, 0), ()])
def test_no_rows_and_one(target: Target, rows: tuple[int, ...]) -> None:
    logits, hidden, weight = target.arrays(np.zeros((*rows, 30)), np.ones((*rows, 4)), np.ones((30, 4)))
    for teacher in (
        xent.top_k(logits, 3, backend=target.name),
        xent.linear_top_k(hidden, weight, 3, backend=target.name),
    ):
        assert tuple(teacher.ids.shape) == tuple(teacher.log_probs.shape) == (*rows, 3)


def test_a_student_learns_from_them(target: Target) -> None:
    """With all classes the divergence is that of the whole distributions; of the same distribution it is 0."""
    rng = np.random.default_rng(0)
    h, w, th, tw = target.arrays(*(rng.normal(size=shape) for shape in ((5, 4), (60, 4), (5, 6), (60, 6))))
    named = {"temperature": 1.5, "backend": target.name}
    whole = xent.linear_divergence(h, w, xent.LinearTeacher(th, tw), **named)
    target.close(xent.linear_divergence(h, w, xent.linear_top_k(th, tw, 60, **named), **named), whole, rtol=1e-5)
    few = xent.linear_divergence(h, w, xent.linear_top_k(th, tw, 8, **named), **named)
    assert 0 < float(few) < float(whole)
    assert abs(float(xent.linear_divergence(h, w, xent.linear_top_k(h, w, 8, **named), **named))) < 1e-6


@pytest.mark.parametrize("k", BAD_K)
def test_bad_k(target: Target, k: Any) -> None:
    logits, hidden, weight = target.arrays(np.zeros((2, 11)), np.zeros((2, 4)), np.zeros((11, 4)))
    error = ValueError if type(k) is int else TypeError
    for call in (
        lambda: xent.top_k(logits, k, backend=target.name),
        lambda: xent.linear_top_k(hidden, weight, k, backend=target.name),
        lambda: xent.top_k(np.zeros((2, 11)), k),
    ):
        with pytest.raises(error, match=r"k must be an int from 1 to the number of classes, 11, got"):
            call()


def test_bad_arguments(target: Target) -> None:
    empty, logits, hidden = target.arrays(np.zeros((2, 0)), np.zeros((2, 11)), np.zeros((2, 4)))
    for error, words, call in (
        (ValueError, "there must be at least one class", lambda: xent.top_k(empty, 1, backend=target.name)),
        (ValueError, "temperature must be finite and > 0", lambda: xent.top_k(logits, 1, temperature=0.0)),
        (TypeError, "temperature must be a number", lambda: xent.top_k(logits, 1, temperature=logits[:, 0])),
        (ValueError, "axis must be in", lambda: xent.top_k(logits, 1, axis=2)),
        (ValueError, r"linear_weight must have shape \(V, D\)", lambda: xent.linear_top_k(hidden, logits, 1)),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize(
    *crossed(
        options=[*ACTIVATIONS, {"temperature": "rows"}, {"logit_scale": 0.0}],
        dtype=DTYPES[:3],
        support=[False, True],
        workspace=[None, 400],
    )
)
def test_rank(target: Target, options: dict[str, Any], dtype: str, support: bool, workspace: int | None) -> None:
    """The factors are integers, so that many logits are equal."""
    rng = np.random.default_rng(0)
    y = np.concatenate([rng.integers(90, size=10), [-100, 5]])
    hidden, of_hidden = placed(target, rng.integers(-2, 3, (12, 6)), dtype)
    weight, of_weight = placed(target, rng.integers(-2, 3, (90, 6)), dtype)
    logits, of_logits = placed(target, of_hidden @ of_weight.T, dtype)
    arrays = {"target": y} | ({"temperature": rng.uniform(0.5, 2, 12)} if options.get("temperature") == "rows" else {})
    on_device = dict(zip(arrays, target.arrays(*arrays.values()), strict=True))
    if support:
        ids, offsets = np.tile(np.arange(0, 90, 3), 12), np.arange(13) * 30
        arrays["support"] = xent.Support(ids, offsets)
        on_device["support"] = xent.Support(*target.arrays(ids, offsets))
    stats = ("rank", "accuracy", "predictions")
    for linear in (False, True):
        function = xent.linear_log_probs if linear else xent.log_probs
        named = {**options, "stats": stats} | ({"workspace": workspace} if linear else {})
        expected = function(*((of_hidden, of_weight) if linear else (of_logits,)), **(named | arrays))[1]
        sources = (hidden, weight) if linear else (logits,)
        reported = function(*sources, **(named | on_device), backend=target.name)[1]
        for name in stats:
            target.close(getattr(reported, name), getattr(expected, name))
        rank, accuracy = (target.numbers(getattr(reported, name)) for name in stats[:2])
        assert rank[10] == -1
        assert (rank[accuracy == 1] == 0).all()
        assert (rank > 1).any() or not options.get("logit_scale", 1)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_rank_is_0_where_the_prediction_is_the_target(target: Target, dtype: str) -> None:
    """Also where the logits of 16-bit hidden states differ by their rounding."""
    rng = np.random.default_rng(0)
    hidden, weight = target.arrays(rng.normal(size=(64, 96)), rng.normal(size=(70, 96)), dtype=dtype)
    named = {"stats": ("rank", "accuracy", "predictions"), "backend": target.name}
    (zeros,) = target.arrays(np.zeros(64, np.int64))
    best = xent.linear_log_probs(hidden, weight, zeros, **named)[1].predictions
    for targets, first in ((best, True), (zeros, False)):
        stats = xent.linear_log_probs(hidden, weight, targets, **named)[1]
        rank, accuracy = target.numbers(stats.rank), target.numbers(stats.accuracy)
        np.testing.assert_array_equal(rank == 0, accuracy == 1)
        assert not first or not rank.any()


def test_rank_with_nan(target: Target) -> None:
    """NaN is the largest logit, as in predictions."""
    logits = np.array([[1.0, np.nan, 3.0], [1.0, 2.0, 3.0], [np.nan, np.nan, 1.0]])
    for y, ranks in (([2, 2, 2], [1, 0, 2]), ([1, 0, 1], [0, 2, 0])):
        arrays = target.arrays(logits, np.array(y))
        stats = xent.log_probs(*arrays, stats=("rank",), backend=target.name)[1]
        np.testing.assert_array_equal(target.numbers(stats.rank), ranks)
        np.testing.assert_array_equal(xent.log_probs(logits, np.array(y), stats=("rank",))[1].rank, ranks)
