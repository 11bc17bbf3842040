"""Find out from MLX's graph which arrays of a call are differentiated.

MLX does not tell a function whether `mx.grad` is active, or for which arrays; it simply does not evaluate results that
are not needed. This is not enough here: to keep only one chunk in memory, each chunk must depend on the gradients of
the chunk before, but not on gradients that are not needed. So the graph is inspected. `mx.grad` and similar functions
pass copies of the differentiated arrays. An array is differentiated if it is traced and depends on such a copy, other
than through `mx.stop_gradient`.

A wrong answer costs time, but no gradient is missing: gradients that were not expected are computed when needed.
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


def is_one(scalar: mx.array) -> bool:
    """Whether a 0-d array is known to be 1 without evaluation, as the upstream gradient of the loss itself is."""
    if _PRIMITIVE.search(_drawing(scalar)):
        return False
    try:
        return bool(scalar.item() == 1)
    except (RuntimeError, ValueError):  # an argument of a traced function has no value yet
        return False


def is_zero(array: mx.array) -> bool:
    """Whether an array is known to be 0 everywhere, as the upstream gradient of an unused result is."""
    if not {name for _, name in _PRIMITIVE.findall(_drawing(array))} <= {"Broadcast", "ExpandDims", "Full"}:
        return False
    try:
        return not array.any().item()
    except (RuntimeError, ValueError):
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
