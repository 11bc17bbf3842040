"""How a loss that is computed beside the graph gets its gradients, and what raises.

`mx.custom_function` runs nothing by itself: it says that the loss, computed already as a graph that MLX does not
differentiate, has these gradients with respect to these arrays.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import mlx.core as mx

from xent.backends.mlx.devices import device_type
from xent.backends.mlx.tracing import is_one

__all__ = ["scaled", "with_gradients"]

_Multiply = Callable[[mx.array, mx.array], mx.array]

_NO_SECOND = (
    "xent computes no second derivatives: its gradients cannot be differentiated again. Use the plain framework loss "
    "where a gradient of a gradient is needed"
)
_NO_FORWARD = "xent computes no forward-mode derivatives: use mx.vjp or mx.grad, or the plain loss with mx.jvp"
_NO_VMAP = "xent's losses cannot be vectorised by mx.vmap: they take any leading axes, and weights for each row"


def with_gradients(
    loss: mx.array, inputs: Sequence[mx.array], gradients: Callable[[mx.array | None], list[mx.array]]
) -> mx.array:
    """Return `loss`, whose gradients with respect to `inputs` are what `gradients` returns for an upstream gradient.

    They get None for an upstream gradient that is known to be 1, as that of the loss itself is. They are called for
    while MLX traces, and evaluated only if something needs them.
    """

    @mx.custom_function
    def given(*_: mx.array) -> mx.array:
        return loss

    def vjp(primals: Any, upstream: mx.array, _: mx.array) -> Any:
        arrays = list(primals) if isinstance(primals, (tuple, list)) else [primals]
        constant = None if is_one(upstream) else mx.stop_gradient(upstream)
        return _first_order(gradients(constant), [upstream, *arrays])

    given.vjp(vjp)
    given.jvp(_refuse(NotImplementedError, _NO_FORWARD))
    given.vmap(_refuse(NotImplementedError, _NO_VMAP))
    made: Any = given(*inputs)
    return cast(mx.array, made)


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
