"""Detection of differentiated arrays under each transformation. A wrong result would double the work."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from xent.backends.mlx.autograd import is_differentiated, is_one, is_traced, is_zero

X, W = mx.ones((3, 4)), mx.ones((5, 4))


def seen_by(transform: Callable[[Callable[..., Any]], Callable[..., Any]], prepare: Any = lambda w: w) -> list[bool]:
    """Return whether x, w and a captured array are seen as differentiated in a transformed function of (x, w)."""
    seen: list[bool] = []
    closed_over = mx.ones((2,))

    def function(x: mx.array, w: mx.array) -> mx.array:
        seen[:] = [is_differentiated(array) for array in (x @ W.T, prepare(w), closed_over * 2)]
        return (x @ w.T).sum()

    mx.eval(transform(function)(X, W))
    return seen


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda function: function, [False, False, False]),
        (mx.compile, [False, False, False]),
        (lambda function: mx.grad(function, argnums=(0, 1)), [True, True, False]),
        (lambda function: mx.value_and_grad(function, argnums=(0, 1)), [True, True, False]),
        (lambda function: mx.compile(mx.grad(function, argnums=(0, 1))), [True, True, False]),
        (lambda function: mx.grad(mx.checkpoint(function), argnums=(0, 1)), [True, True, False]),
    ],
    ids=["eager", "compile", "grad", "value_and_grad", "compile of grad", "checkpoint"],
)
def test_differentiated_arrays_are_detected(transform: Any, expected: list[bool]) -> None:
    assert seen_by(transform) == expected


@pytest.mark.parametrize("transform", [mx.grad, lambda function: mx.compile(mx.grad(function))])
def test_stop_gradient_hides_its_argument(transform: Any) -> None:
    assert seen_by(transform, lambda w: mx.stop_gradient(w * 2) + 1) == [True, False, False]


@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_of_a_captured_model(compiled: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 5, bias=False))
    model.layers[1].freeze()
    seen: list[bool] = []

    def function(x: mx.array) -> mx.array:
        seen[:] = [is_differentiated(layer.weight) for layer in model.layers]
        return model(x).sum()

    step = nn.value_and_grad(model, function)
    mx.eval((mx.compile(step, inputs=model.state, outputs=model.state) if compiled else step)(X))
    assert seen == [True, False]


def test_constant_one_is_recognised_without_evaluation() -> None:
    assert is_one(mx.array(1.0))
    assert not is_one(mx.array(2.0))
    assert not is_one(mx.array(0.5) * 2)
    seen: list[bool] = []

    def function(x: mx.array) -> mx.array:
        seen.append(is_one(x))
        seen.append(is_traced(x))
        return 2 * x

    mx.compile(function)(mx.array(1.0))
    assert seen == [False, True]


def test_upstream_gradient_of_an_unused_output_is_recognised_as_zero() -> None:
    seen: list[bool] = []

    @mx.custom_function
    def both(x: mx.array) -> list[mx.array]:
        return [x.sum(-1), x.max(-1)]

    @both.vjp
    def vjp(x: mx.array, upstream: list[mx.array], _: list[mx.array]) -> mx.array:
        seen.extend(is_zero(one) for one in upstream)
        return mx.zeros_like(x)

    used_first = mx.grad(lambda x: both(x)[0].sum())
    mx.eval(used_first(X), mx.compile(used_first)(X), mx.grad(lambda x: (0 * both(x)[1]).sum())(X))
    assert seen == [False, True] * 2 + [True, False]
    assert is_zero(mx.zeros((3,)))
    assert not is_zero(mx.array([0.0, 1.0]))


def test_upstream_gradient_of_a_loss_is_one() -> None:
    seen: list[bool] = []

    @mx.custom_function
    def loss(x: mx.array) -> mx.array:
        return x.sum()

    @loss.vjp
    def vjp(x: mx.array, upstream: mx.array, _: mx.array) -> mx.array:
        seen.append(is_one(upstream))
        return upstream * mx.ones_like(x)

    mx.eval(mx.grad(loss)(X), mx.grad(lambda x: 2 * loss(x))(X), mx.compile(mx.value_and_grad(loss))(X))
    assert seen == [True, False, True]
