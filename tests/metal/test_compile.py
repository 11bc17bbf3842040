"""Graphs of compiled functions with the Metal kernels, which the eager emulator cannot test.

Nothing is computed. On machines without Metal, MLX allows kernels in a graph while `mx.export_function` traces. These
tests examine the graph; `test_gpu.py` runs it on an Apple GPU.
"""

import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

import xent
from tests.metal.emulator.kernels import metal_kernel
from xent.backends.metal import rows, sources

N, D, V, CHUNKS = 12, 8, 40, 3


@pytest.fixture(autouse=True)
def real_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    monkeypatch.setattr(rows, "allows", lambda *_: True)
    sources.mlx_kernel.cache_clear()
    yield
    sources.mlx_kernel.cache_clear()


def launches(function: Callable[..., Any], *arrays: mx.array) -> list[set[str]]:
    """Return, for each kernel in the graph of a function, the kernels that must run before it."""
    drawing = io.StringIO()

    def trace(*given: mx.array) -> mx.array:
        mx.export_to_dot(drawing, *function(*given))
        return given[0]

    mx.export_function(lambda node: None, trace, *arrays)
    names = dict(re.findall(r'^\{ (\d+) \[label ="([^"]*)"', drawing.getvalue(), re.MULTILINE))
    makers = {output: maker for maker, output in re.findall(r'^(\d+) -> "([^"]*)"$', drawing.getvalue(), re.MULTILINE)}
    before = {name: set() for name in names}
    for array, user in re.findall(r'^"([^"]*)" -> (\d+)$', drawing.getvalue(), re.MULTILINE):
        if array in makers:
            before[user].add(makers[array])

    def all_before(name: str, seen: set[str]) -> set[str]:
        waiting = [name]
        while waiting:
            new = before[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    kernels = {name for name, label in names.items() if "CustomKernel" in label}
    return [all_before(name, set()) & kernels for name in kernels]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"stats": ("entropy", "accuracy"), "softcap": 5.0, "label_smoothing": 0.1}], ids=str
)
def test_chunks_launch_one_after_the_other(reduction: str, dtype: mx.Dtype, options: dict[str, Any]) -> None:
    targets = mx.arange(N)

    def loss(x: mx.array, w: mx.array, z_loss: mx.array) -> mx.array:
        workspace = N // CHUNKS * V * (4 if options else dtype.size)  # the entropy needs float32 logits
        found = xent.linear_cross_entropy(
            x, w, targets, z_loss=z_loss, reduction=reduction, workspace=workspace, backend="metal", **options
        )
        return (found[0] if options else found).sum()

    def step(*arrays: mx.array) -> list[mx.array]:
        value, gradients = mx.compile(mx.value_and_grad(loss, argnums=(0, 1)))(*arrays)
        return [value, *gradients]

    found = launches(step, mx.ones((N, D), dtype), mx.ones((V, D), dtype), mx.array(0.1))
    expected = CHUNKS if reduction == "mean" else 2 * CHUNKS
    assert sorted(map(len, found)) == list(range(expected))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_launches_for_logits(reduction: str) -> None:
    def loss(z: mx.array) -> mx.array:
        return xent.cross_entropy(z, mx.arange(N), reduction=reduction, backend="metal").sum()

    def step(z: mx.array) -> list[mx.array]:
        value, gradient = mx.compile(mx.value_and_grad(loss))(z)
        return [value, gradient]

    assert len(launches(step, mx.ones((N, V)))) == (1 if reduction == "mean" else 2)
    assert len(launches(lambda z: [mx.compile(loss)(z)], mx.ones((N, V)))) == 1
