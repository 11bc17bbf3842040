"""Attach gradients to a loss with `mx.custom_function`, and raise errors for unsupported transformations.

The loss is computed outside of the custom function, from arrays that MLX does not differentiate. The custom function
only returns it and defines its gradients. All results of a call are computed from `guarded` arrays, so that forward
mode and mx.vmap raise a clear error.

`is_differentiated` finds out from MLX's graph which arrays of a call are differentiated.

MLX does not tell a function whether `mx.grad` is active, or for which arrays; it simply does not evaluate results that
are not needed. This is not enough here: to keep only one chunk in memory, each chunk must depend on the gradients of
the chunk before, but not on gradients that are not needed. So the graph is inspected. `mx.grad` and similar functions
pass copies of the differentiated arrays. An array is differentiated if it is traced and depends on such a copy, other
than through `mx.stop_gradient`.

A wrong answer costs time, but no gradient is missing: gradients that were not expected are computed when needed.
"""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn, TypeVar, cast

import mlx.core as mx

from xent.backends.mlx.devices import device_type
from xent.core.spec import QuantizedWeight

__all__ = ["guarded", "is_differentiated", "is_traced", "scaled", "with_gradients"]

_Tree = TypeVar("_Tree")
_Gradients = Callable[[dict[str, mx.array | None]], list[mx.array]]
"""Maps upstream gradients of outputs, by name, to gradients of inputs."""
_Arrays = mx.array | Sequence[mx.array]
"""What MLX passes for an argument or several, and takes for a result or several."""
_Multiply = Callable[[mx.array, mx.array], mx.array]

_Function = Callable[..., _Arrays]

_PRIMITIVE = re.compile(r'^\{ (\d+) \[label ="([^"]*)"', re.MULTILINE)
_INPUT = re.compile(r'^"([^"]*)" -> (\d+)$', re.MULTILINE)
_OUTPUT = re.compile(r'^(\d+) -> "([^"]*)"$', re.MULTILINE)

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
    """Return an array, or a NamedTuple of arrays, with the same values and without gradient.

    mx.jvp and mx.vmap raise. MLX transforms a graph from its inputs on, so the first operation determines the error.
    It is one operation of all arrays, so that it raises also for a result that the transformed array does not change.
    """
    arrays: list[mx.array] = []

    def keep(array: mx.array) -> mx.array:
        arrays.append(array)
        return array

    _mapped(tree, keep)
    copies = iter(_as_list(_guard()(*arrays)))
    return cast(_Tree, _mapped(tree, lambda _: mx.stop_gradient(next(copies))))


@cache
def _guard() -> Any:
    """Return a function that returns its arrays, and raises in forward mode and under mx.vmap."""
    return _custom(lambda *same: list(same))


def _custom(function: _Function, vjp: _Function | None = None, jvp: _Function | None = None) -> Any:
    """Return a function for MLX to transform with `vjp` alone, unless `jvp` raises another error."""
    custom: Any = mx.custom_function(function)
    if vjp is not None:
        custom.vjp(vjp)
    custom.jvp(jvp or _refuse(NotImplementedError, _NO_FORWARD))
    custom.vmap(_refuse(NotImplementedError, _NO_VMAP))
    return custom


def _mapped(tree: Any, change: Callable[[mx.array], mx.array]) -> Any:
    """Return a copy of `tree` with `change` applied to every array in it."""
    if isinstance(tree, mx.array):
        return change(tree)
    if isinstance(tree, QuantizedWeight):
        return replace(tree, **{name: _mapped(value, change) for name, value in vars(tree).items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_mapped(value, change) for value in tree))
    return tree


def with_gradients(
    outputs: dict[str, mx.array], inputs: Sequence[mx.array], gradients: _Gradients
) -> dict[str, mx.array]:
    """Return `outputs` with gradients with respect to `inputs`: `gradients` returns them for upstream gradients.

    The outputs are a "loss" and statistics. `gradients` gets None for an upstream gradient of the loss that is known to
    be 1, and for one of a statistic that is known to be 0. It is called while MLX traces. MLX evaluates its results
    only if something needs them.
    """

    def vjp(primals: _Arrays, upstream: _Arrays, _: object) -> _Arrays:
        arrays, upstreams = _as_list(primals), _as_list(upstream)
        known = [_is_everywhere(grad, name == "loss") for name, grad in zip(outputs, upstreams, strict=True)]
        constant = [None if skips else guarded(grad) for skips, grad in zip(known, upstreams, strict=True)]
        return _first_order(gradients(dict(zip(outputs, constant, strict=True))), [*upstreams, *arrays])

    results = _custom(lambda *_: list(outputs.values()), vjp)(*inputs)
    return dict(zip(outputs, _as_list(results), strict=True))


def _as_list(arrays: _Arrays) -> list[mx.array]:
    return [arrays] if isinstance(arrays, mx.array) else list(arrays)


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


def _first_order(gradients: list[mx.array], sources: list[mx.array]) -> _Arrays:
    """Return the gradients; differentiating them with respect to any of `sources` raises."""
    refuse = _refuse(RuntimeError, _NO_SECOND)
    # One function per gradient, so that MLX does not evaluate all gradients if only one is needed.
    guarded = [_custom(lambda *_, grad=grad: grad, refuse, refuse)(*sources) for grad in gradients]
    return tuple(guarded) if len(guarded) > 1 else guarded[0]


def _refuse(error: type[Exception], message: str) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        raise error(message)

    return refuse


def is_traced(array: mx.array) -> bool:
    """Whether a transformation traces this array: only then does `mx.compile` run the Python of a compiled function."""
    runs, probe = _probe()
    # If the probe was compiled inside of a transformation, its Python runs once for the first array outside of one.
    for _ in range(2):
        runs.clear()
        probe(array.reshape(-1)[:0].astype(mx.float32))
        if not runs:
            return False
    runs.clear()
    return True


def is_differentiated(array: mx.array) -> bool:
    """Whether a gradient with respect to this array may be needed."""
    if not is_traced(array):
        return False
    text = _drawing(array)
    copied = 'label ="Copy"' in text  # parsing the whole graph of a large model takes several times as long
    return copied and ('label ="StopGradient"' not in text or "Copy" in _ancestors(text))


def _is_everywhere(array: mx.array, value: float) -> bool:
    """Whether an array is known to have this value everywhere, without evaluation of anything that it depends on.

    The upstream gradient of the loss itself is 1, and that of an unused result is 0.
    """
    if not {name for _, name in _PRIMITIVE.findall(_drawing(array))} <= {"Broadcast", "ExpandDims", "Full"}:
        return False
    try:
        return bool((array == value).all().item())
    except (RuntimeError, ValueError):  # an argument of a traced function has no value yet
        return False


@cache
def _probe() -> tuple[list[None], Callable[[mx.array], mx.array]]:
    """Return (list, compiled function). The list grows whenever a call runs the function's Python code."""
    runs: list[None] = []

    def run(array: mx.array) -> mx.array:
        runs.append(None)
        return array

    probe = mx.compile(run)
    probe(mx.zeros((0,)))
    return runs, probe


def _drawing(array: mx.array) -> str:
    """Return MLX's text of the graph that computes an array; the array is named "array" in it."""
    drawing = io.StringIO()
    mx.export_to_dot(drawing, array=array)
    return drawing.getvalue()


def _ancestors(text: str) -> Iterable[str]:
    """Yield the operations that "array" depends on, not those behind `mx.stop_gradient`."""
    names = dict(_PRIMITIVE.findall(text))
    makers = {output: maker for maker, output in _OUTPUT.findall(text)}
    inputs: dict[str, list[str]] = {}
    for source, maker in _INPUT.findall(text):
        inputs.setdefault(maker, []).append(source)
    waiting, seen = ["array"], {"array"}
    while waiting:
        maker = makers.get(waiting.pop())
        if maker is None:
            continue
        yield names[maker]
        if names[maker] != "StopGradient":
            new = [source for source in inputs.get(maker, []) if source not in seen]
            seen.update(new)
            waiting += new
