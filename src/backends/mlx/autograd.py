"""Attach gradients to a loss with `mx.custom_function`, and raise errors for unsupported transformations.

The loss is computed outside of the custom function, from arrays that MLX does not differentiate. The custom function
only returns it and defines its gradients. All results of a call are computed from `guarded` arrays, so that forward
mode and mx.vmap raise a clear error.
"""

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, cast

import mlx.core as mx

from xent.backends.mlx.devices import device_type
from xent.backends.mlx.tracing import is_one, is_zero

__all__ = ["Gradients", "guarded", "scaled", "with_gradients"]

_Tree = TypeVar("_Tree")
Gradients = Callable[[dict[str, mx.array | None]], list[mx.array]]
"""Maps upstream gradients of outputs, by name, to gradients of inputs."""
_Multiply = Callable[[mx.array, mx.array], mx.array]

_NO_SECOND = (
    "xent computes no second derivatives: its gradients cannot be differentiated again. Use the plain framework loss "
    "where a gradient of a gradient is needed"
)
_NO_FORWARD = "xent computes no forward-mode derivatives: use mx.vjp or mx.grad, or the plain loss with mx.jvp"
_NO_VMAP = (
    "mx.vmap cannot vectorise xent's functions, their statistics or their gradients: pass all leading axes in one "
    'call, with reduction="none" if the losses are wanted apart'
)


def guarded(tree: _Tree) -> _Tree:
    """Return an array, or a tuple or dataclass of arrays, with the same values and without gradient.

    mx.jvp and mx.vmap raise. MLX transforms a graph from its inputs on, so the first operation determines the error.
    """
    arrays: list[mx.array] = []

    def keep(array: mx.array) -> mx.array:
        arrays.append(array)
        return array

    _mapped(tree, keep)
    made = iter(cast(list[mx.array], _guard()(*arrays)))
    return cast(_Tree, _mapped(tree, lambda _: mx.stop_gradient(next(made))))


@cache
def _guard() -> Any:
    """Return a function that returns its arrays, and raises in forward mode and under mx.vmap."""

    @mx.custom_function
    def guard(*same: mx.array) -> list[mx.array]:
        return list(same)

    guard.jvp(_refuse(NotImplementedError, _NO_FORWARD))
    guard.vmap(_refuse(NotImplementedError, _NO_VMAP))
    return guard


def _mapped(tree: Any, change: Callable[[mx.array], mx.array]) -> Any:
    """Return a copy of `tree` with `change` applied to every array in it."""
    if isinstance(tree, mx.array):
        return change(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_mapped(value, change) for value in tree))
    if not is_dataclass(tree) or isinstance(tree, type):
        return tree
    made = {name: _mapped(value, change) for name, value in vars(tree).items()}
    changed = {name: value for name, value in made.items() if value is not getattr(tree, name)}
    return replace(tree, **changed) if changed else tree


def with_gradients(
    outputs: dict[str, mx.array], inputs: Sequence[mx.array], gradients: Gradients
) -> dict[str, mx.array]:
    """Return `outputs` with gradients with respect to `inputs`: `gradients` returns them for upstream gradients.

    The outputs are a "loss" and statistics. `gradients` gets None for an upstream gradient of the loss that is known to
    be 1, and for one of a statistic that is known to be 0. It is called while MLX traces. MLX evaluates its results
    only if something needs them.
    """

    @mx.custom_function
    def given(*_: mx.array) -> list[mx.array]:
        return list(outputs.values())

    def vjp(primals: Any, upstream: Any, _: Any) -> Any:
        arrays, given = _as_list(primals), _as_list(upstream)
        known = [(is_one if name == "loss" else is_zero)(one) for name, one in zip(outputs, given, strict=True)]
        constant = [None if skips else guarded(one) for skips, one in zip(known, given, strict=True)]
        return _first_order(gradients(dict(zip(outputs, constant, strict=True))), [*given, *arrays])

    given.vjp(vjp)
    given.jvp(_refuse(NotImplementedError, _NO_FORWARD))
    given.vmap(_refuse(NotImplementedError, _NO_VMAP))
    made: Any = given(*inputs)
    return dict(zip(outputs, _as_list(made), strict=True))


def _as_list(arrays: Any) -> list[mx.array]:
    return list(arrays) if isinstance(arrays, (tuple, list)) else [arrays]


def scaled(grad: mx.array, factor: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """Return grad * factor as `dtype`, rounded once. A factor of None means 1 and needs no pass."""
    return grad.astype(dtype) if factor is None else _multiply_as(dtype, device_type())(grad, factor)


@cache
def _multiply_as(dtype: mx.Dtype, device: str) -> _Multiply:
    """Return a function that multiplies an array by a 0-d factor, in the factor's dtype, and rounds to `dtype`.

    On a GPU it is compiled into one pass, without an intermediate array of the wider dtype. On a CPU it is not
    compiled, because mx.compile would need a C++ compiler.
    """

    def multiply(grad: mx.array, factor: mx.array) -> mx.array:
        return (grad.astype(factor.dtype) * factor).astype(dtype)

    return multiply if device == "cpu" else cast(_Multiply, mx.compile(multiply, shapeless=True))


def _first_order(made: list[mx.array], sources: list[mx.array]) -> tuple[mx.array, ...] | mx.array:
    """Return the gradients; differentiating them with respect to any of `sources` raises."""
    guarded: list[Any] = []
    for grad in made:
        # One function per gradient, so that MLX does not evaluate all gradients if only one is needed.
        @mx.custom_function
        def given(*_: mx.array, grad: mx.array = grad) -> mx.array:
            return grad

        given.vjp(_refuse(RuntimeError, _NO_SECOND))
        given.jvp(_refuse(RuntimeError, _NO_SECOND))
        guarded.append(given(*sources))
    return tuple(guarded) if len(guarded) > 1 else guarded[0]


def _refuse(error: type[Exception], message: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise error(message)

    return refuse
