"""What a call can know about the transformations that MLX is tracing it for.

MLX says neither whether `mx.grad` is at work nor for which arrays, and what is not needed is simply never evaluated.
That is not enough here: to have one chunk alive at a time, the next chunk has to wait for the gradients made from this
one, and must not wait for gradients that nobody wants. So the graph is asked. `mx.grad` and its relatives hand over
copies of the arrays that they follow; an array is differentiated if it is traced and comes from such a copy other than
through `mx.stop_gradient`.

A wrong answer costs time, never a gradient: what was not foreseen is computed when it is asked for.
"""

import io
import re
from collections.abc import Callable, Iterable
from functools import cache

import mlx.core as mx

__all__ = ["is_differentiated", "is_one", "is_traced", "is_zero"]

_PRIMITIVE = re.compile(r'^\{ (\d+) \[label ="([^"]*)"', re.MULTILINE)
_INPUT = re.compile(r'^"([^"]*)" -> (\d+)$', re.MULTILINE)
_OUTPUT = re.compile(r'^(\d+) -> "([^"]*)"$', re.MULTILINE)


def is_traced(array: mx.array) -> bool:
    """Whether a transformation follows this array: `mx.compile` runs a function's Python for such arrays alone."""
    runs, probe = _probe()
    # Where the probe was compiled inside of a transformation, Python runs once more for the first array outside of one.
    for _ in range(2):
        runs.clear()
        probe(array.reshape(-1)[:0].astype(mx.float32))
        if not runs:
            return False
    runs.clear()
    return True


def is_differentiated(array: mx.array) -> bool:
    """Whether a gradient with respect to this array may be asked for."""
    if not is_traced(array):
        return False
    text = _drawing(array)
    copied = 'label ="Copy"' in text  # reading the whole of a large model's graph takes several times as long
    return copied and ('label ="StopGradient"' not in text or "Copy" in _ancestors(text))


def is_one(scalar: mx.array) -> bool:
    """Whether a 0-d array is known to be 1 without computing anything, as the gradient of a loss itself is."""
    if _PRIMITIVE.search(_drawing(scalar)):
        return False
    try:
        return bool(scalar.item() == 1)
    except (RuntimeError, ValueError):  # the argument of a function that mx.compile traces, which has no value yet
        return False


def is_zero(array: mx.array) -> bool:
    """Whether an array is known to be 0 everywhere, as the gradient of what nobody used is."""
    if not {name for _, name in _PRIMITIVE.findall(_drawing(array))} <= {"Broadcast", "ExpandDims", "Full"}:
        return False
    try:
        return not array.any().item()
    except (RuntimeError, ValueError):
        return False


@cache
def _probe() -> tuple[list[None], Callable[[mx.array], mx.array]]:
    """Return a list that grows whenever Python runs for a call of the compiled function beside it."""
    runs: list[None] = []

    def run(array: mx.array) -> mx.array:
        runs.append(None)
        return array

    probe = mx.compile(run)
    probe(mx.zeros((0,)))
    return runs, probe


def _drawing(array: mx.array) -> str:
    """Return MLX's own description of the graph that an array comes from; the array is called "array" in it."""
    drawing = io.StringIO()
    mx.export_to_dot(drawing, array=array)
    return drawing.getvalue()


def _ancestors(text: str) -> Iterable[str]:
    """Yield the operations that "array" comes from, stopping where `mx.stop_gradient` cuts the graph."""
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
