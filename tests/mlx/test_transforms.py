"""MLX's transformations: correct gradients, no retracing for a new value, errors instead of zeros."""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import xent
from tests.covering import crossed
from tests.targets import Target
from xent.backends.mlx import autograd, driver
from xent.core.spec import LOG_PROB_STATS, STAT_NAMES

V, D = 23, 8
RNG = np.random.default_rng(5)
X = mx.array(RNG.normal(size=(6, D)).astype(np.float32))
W = mx.array(RNG.normal(size=(V, D)).astype(np.float32))
B = mx.array(RNG.normal(size=(V,)).astype(np.float32))
Y = mx.array(np.array([0, 5, -100, 22, 7, 7]))
CHUNK = 2 * V * 4


def linear(target: Target, **options: Any) -> Callable[..., mx.array]:
    def loss(x: mx.array, w: mx.array, b: mx.array | None = None) -> mx.array:
        found = xent.linear_cross_entropy(x, w, Y, linear_bias=b, workspace=CHUNK, backend=target.name, **options)
        return (found * mx.arange(6)).sum() if options.get("reduction") == "none" else found

    return loss


def unfused(x: mx.array, w: mx.array) -> mx.array:
    return mx.where(Y == -100, 0, nn.losses.cross_entropy(x @ w.T, mx.maximum(Y, 0))).sum() / 5


def close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "heads", [{}, {"shift": (1, 2), "head_weight": (1.0, 0.5), "weight": mx.array(np.abs(np.array(W[:, 0])))}], ids=len
)
def test_new_values_of_options_retrace_nothing(target: Target, heads: dict[str, Any]) -> None:
    traces, x = [], mx.stack([X, 2 * X]) if heads else X

    def loss(x: mx.array, w: mx.array, values: dict[str, mx.array]) -> mx.array:
        traces.append(1)
        return linear(target, **values, **heads)(x, w)

    plain, names = mx.value_and_grad(loss, argnums=(0, 1)), ("label_smoothing", "z_loss", "softcap", "logit_scale")
    step = mx.compile(plain)
    for value in (0.25, 0.5, 0.75):
        values = {name: mx.array(value + place / 8) for place, name in enumerate((*names, "normalizer"))}
        (found, gradients), (expected, others) = step(x, W, values), plain(x, W, values)
        close([found, *gradients], [expected, *others])
    assert len(traces) == 1 + 3


ROWS = {"target": Y, "weight": mx.abs(W[:, 0]), "sample_weight": mx.abs(X[:, 0]), "normalizer": mx.array(3.0)}
PARTS = {"ids": mx.tile(mx.arange(V), 6), "offsets": mx.arange(7) * V, "temperature": mx.abs(X[:, 0]) + 1}
CALLS: dict[str, dict[str, mx.array]] = {
    "cross_entropy": {"logits": X @ W.T} | ROWS,
    "linear_cross_entropy": {"input": X, "linear_weight": W, "linear_bias": B, "logit_scale": mx.array(0.5)} | ROWS,
    "heads": {"input": mx.stack([X, 2 * X]), "linear_weight": W} | ROWS,
    "log_probs": {"logits": X @ W.T, "target": Y} | PARTS,
    "divergence": {"logits": X @ W.T, "teacher": W[:6, :1] + X @ W.T * 2},
}
PLACES = [(call, name) for call, arrays in CALLS.items() for name in arrays]


def of_array(target: Target, call: str, name: str, stat: str | None = None) -> Callable[[mx.array], mx.array]:
    """Return the result, or a statistic, as a function of one array of the call."""

    def function(array: mx.array) -> mx.array:
        given = CALLS[call] | {name: array}
        if call == "log_probs":
            given["support"] = xent.Support(given.pop("ids"), given.pop("offsets"))
        if call == "heads":
            given["shift"] = (1, 2)
        stats = {"stats": (stat,)} if stat else {}
        run = xent.linear_cross_entropy if call == "heads" else getattr(xent, call)
        found = run(**given, **stats, backend=target.name)
        return getattr(found[1], stat) if stat else found

    return function


def stats_of(call: str) -> tuple[str | None, ...]:
    return (None, *{"log_probs": LOG_PROB_STATS, "divergence": ("entropy",)}.get(call, STAT_NAMES))


@pytest.mark.parametrize(("call", "name"), PLACES)
def test_vmap_and_forward_mode_raise(target: Target, call: str, name: str) -> None:
    """MLX's own vmap of operations in statistics gives wrong numbers, and a derivative of zero would be wrong too."""
    array = CALLS[call][name]
    for stat in stats_of(call):
        function = of_array(target, call, name, stat)
        with pytest.raises(NotImplementedError, match=r"mx\.vmap cannot vectorise xent.* pass all leading axes"):
            mx.eval(mx.vmap(function)(mx.stack([array] * 2)))
        if array.dtype == mx.float32 and stat in (None, "nll", "z_loss"):
            with pytest.raises(NotImplementedError, match="forward-mode"):
                mx.eval(mx.jvp(function, [array], [array]))


@pytest.mark.parametrize("call", CALLS)
def test_second_derivatives_raise(target: Target, call: str) -> None:
    """A temperature has no gradient at all."""
    name = next(iter(CALLS[call]))
    loss, array = of_array(target, call, name), CALLS[call][name]
    with pytest.raises(RuntimeError, match="no second derivatives"):
        mx.grad(lambda x: mx.grad(lambda x: loss(x).sum())(x).sum())(array)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        mx.grad(lambda scale: mx.grad(lambda x: scale * loss(x).sum())(array).sum())(mx.array(2.0))
    if call == "log_probs":
        heat = of_array(target, call, "temperature")
        assert not mx.grad(lambda array: heat(array).sum())(CALLS[call]["temperature"]).any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap_of_gradients_raises(target: Target, reduction: str) -> None:
    loss, rows = linear(target, reduction=reduction), X[None] + mx.zeros((2, 1, 1))
    for function in (mx.grad(loss), mx.compile(mx.grad(loss)), lambda x, w: mx.grad(loss, argnums=1)(x, w)):
        with pytest.raises(NotImplementedError, match=r"mx\.vmap cannot vectorise xent"):
            mx.eval(mx.vmap(function, in_axes=(0, None))(rows, W))
    upstream = mx.ones((2, 6) if reduction == "none" else (2,))

    def pulled(upstream: mx.array) -> mx.array:
        call = functools.partial(xent.linear_cross_entropy, reduction=reduction, backend=target.name)
        return mx.vjp(lambda x: call(x, W, Y), [X], [upstream])[1][0]

    with pytest.raises(NotImplementedError, match=r"mx\.vmap cannot vectorise xent"):
        mx.eval(mx.vmap(pulled)(upstream))


def test_compiled_divergences_have_the_same_gradients(target: Target) -> None:
    def loss(x: mx.array, w: mx.array, wide: mx.array, head: mx.array) -> mx.array:
        teacher, options = xent.LinearTeacher(wide, head), {"beta": 0.5, "workspace": CHUNK, "backend": target.name}
        rows = xent.linear_divergence(x, w, teacher, reduction="none", **options)
        return rows.sum() + 3 * xent.linear_divergence(x, w, teacher, **options)

    step = mx.value_and_grad(loss, argnums=(0, 1))
    (value, found), (expected_value, expected) = (run(X, W, 2 * X, W[::-1]) for run in (mx.compile(step), step))
    close([value, *found], [expected_value, *expected])


def test_checkpoint_has_the_same_gradients(target: Target) -> None:
    found = mx.grad(mx.checkpoint(linear(target)), argnums=(0, 1))(X, W)
    close(found, mx.grad(unfused, argnums=(0, 1))(X, W))


def test_targets_are_not_checked_while_compiling(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")

    def loss(x: mx.array, y: mx.array) -> mx.array:
        return xent.cross_entropy(x, y, reduction="none", backend=target.name)

    wrong = mx.array([0, 99, 1, 1, 1, 1])
    found = np.array(mx.compile(loss)(X, wrong))
    np.testing.assert_array_equal(np.isnan(found), [False, True, False, False, False, False])
    with pytest.raises(IndexError, match=r"target\[1\] is 99"):
        mx.grad(lambda x: loss(x, wrong).sum())(X)


@pytest.mark.parametrize(
    *crossed(differentiated=[False, True], names=[("accuracy", "count"), STAT_NAMES], count=[0, 6])
)
def test_compiled_functions_return_statistics(
    target: Target, differentiated: bool, names: tuple[str, ...], count: int
) -> None:
    def loss(x: mx.array) -> tuple[mx.array, ...]:
        found, stats = xent.linear_cross_entropy(x, W, Y[:count], z_loss=0.1, stats=names, backend=target.name)
        return found, *(getattr(stats, name) for name in names)

    function = mx.value_and_grad(loss) if differentiated else loss
    found, expected = mx.compile(function)(X[:count]), function(X[:count])
    close(*(made[0] if differentiated else made for made in (found, expected)))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_operations_without_rows(target: Target, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NVIDIA GPUs MLX crashes in some operations on empty arrays."""
    monkeypatch.setattr(driver, "gather_facts", None)
    options = {"reduction": reduction, "stats": STAT_NAMES, "backend": target.name}
    found, stats = xent.linear_cross_entropy(X[:0], W, Y[:0], **options)
    assert found.shape == stats.z_loss.shape == ((0,) if reduction == "none" else ())
    assert stats.lse.shape == stats.predictions.shape == (0,)
    assert stats.count.item() == stats.accuracy.item() == 0


def test_array_outside_of_a_transformation_is_not_seen_as_traced(target: Target) -> None:
    """Even if the first call of the process was inside of a transformation."""
    teacher = xent.TopKTeacher(mx.array([[0, 3]] * 6), mx.full((6, 2), -1.5))
    autograd._probe.cache_clear()
    mx.eval(mx.grad(lambda x: xent.linear_divergence(x, W, teacher, backend=target.name))(X))
    assert not autograd.is_traced(mx.zeros(3))
