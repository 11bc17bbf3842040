"""How a loss that is computed beside the graph gets its gradients, and what raises.

`mx.custom_function` runs nothing by itself: it says that the loss, computed already as a graph that MLX does not
differentiate, has these gradients with respect to these arrays. All that a call returns is computed from `guarded`
arrays, so that forward mode and mx.vmap meet an error before they meet an operation.
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
"""From the upstream gradients of outputs, by name, to the gradients of inputs."""
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
    """Return an array, or a dataclass of arrays, with the same values; without gradient, and mx.jvp and mx.vmap raise.

    MLX transforms a graph from its inputs on, so the first operation decides which error a caller sees.
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
    """Return what passes arrays on and raises in forward mode and under mx.vmap."""

    @mx.custom_function
    def guard(*same: mx.array) -> list[mx.array]:
        return list(same)

    guard.jvp(_refuse(NotImplementedError, _NO_FORWARD))
    guard.vmap(_refuse(NotImplementedError, _NO_VMAP))
    return guard


def _mapped(tree: Any, change: Callable[[mx.array], mx.array]) -> Any:
    """Return a copy of `tree` with `change` done to every array in it."""
    if isinstance(tree, mx.array):
        return change(tree)
    if not is_dataclass(tree) or isinstance(tree, type):
        return tree
    made = {name: _mapped(value, change) for name, value in vars(tree).items()}
    changed = {name: value for name, value in made.items() if value is not getattr(tree, name)}
    return replace(tree, **changed) if changed else tree


def with_gradients(
    outputs: dict[str, mx.array], inputs: Sequence[mx.array], gradients: Gradients
) -> dict[str, mx.array]:
    """Return `outputs`, whose gradients with respect to `inputs` are what `gradients` returns for upstream gradients.

    The outputs are a "loss" and statistics. `gradients` gets None for an upstream gradient of the loss that is known to
    be 1, as that of the loss itself is, and for one of a statistic that is known to be 0. It is called while MLX
    traces, and what it returns is evaluated only if something needs it.
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
    """Return grad * factor as `dtype`, rounded once; None for a factor of 1, which takes no pass."""
    return grad.astype(dtype) if factor is None else _multiply_as(dtype, device_type())(grad, factor)


@cache
def _multiply_as(dtype: mx.Dtype, device: str) -> _Multiply:
    """Return what multiplies an array by a 0-d factor, in the factor's dtype, and rounds to `dtype`.

    On a GPU it is one pass, with nothing of the wider dtype in memory. On a CPU mx.compile would need a C++ compiler.
    """

    def multiply(grad: mx.array, factor: mx.array) -> mx.array:
        return (grad.astype(factor.dtype) * factor).astype(dtype)

    return multiply if device == "cpu" else cast(_Multiply, mx.compile(multiply, shapeless=True))


def _first_order(made: list[mx.array], sources: list[mx.array]) -> tuple[mx.array, ...] | mx.array:
    """Return the gradients; differentiating them with respect to any of `sources` raises."""
    guarded: list[Any] = []
    for grad in made:
        # One function for each, so that a gradient that nobody needs is not evaluated for another's sake.
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
