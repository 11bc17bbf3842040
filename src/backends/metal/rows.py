"""Launch the Metal kernel for a block of MLX logits: template arguments, threads, arrays, and trials of kernels.

The largest number of threads of a pipeline depends on its registers, which Apple's compiler chooses. MLX does not
report it: a launch with more threads fails when the graph is evaluated, in an unrelated line of the program, and so
does a source that does not compile. Therefore each kernel is launched once, with one threadgroup and at most 8 elements
per axis, and evaluated at once, before a launch is part of a graph.
"""

import warnings
from collections.abc import Collection
from typing import Any

import mlx.core as mx

from xent.backends.metal.sources import INPUTS, OUTPUTS, KernelError, Template, kernel_for, mlx_kernel
from xent.backends.mlx import plain
from xent.backends.mlx.block import ranks
from xent.backends.mlx.kernels import Facts, Results

__all__ = ["allows", "backward", "forward"]

_SMALL = 8  # elements: MLX passes smaller arrays in constant memory, but the kernel expects device memory
_Array = tuple[tuple[int, ...], mx.Dtype]
_tried: dict[Any, "bool | KernelError"] = {}


def forward(logits: mx.array, facts: Facts, requested: Collection[str]) -> Results:
    """Compute a block: see `xent.backends.mlx.kernels`."""
    try:
        results = _launch(logits, facts, {name for name in OUTPUTS if name in requested})
        return results | {"rank": ranks(logits, facts)} if "rank" in requested else results
    except KernelError as error:
        _warn(error)
        return plain.forward(logits, facts, requested)


def backward(logits: mx.array, facts: Facts, norm: mx.array) -> mx.array:
    """Return the gradient of a block: see `xent.backends.mlx.kernels`."""
    upstream, nothing = None, mx.zeros_like(facts.scale)
    if facts.upstream:
        upstream = mx.stack([facts.upstream.get(name, nothing) for name in ("lse", "nll", "entropy", "H")], axis=-1)
    try:
        return _launch(logits, facts, {"grad"}, norm, upstream)["grad"]
    except KernelError as error:
        _warn(error)
        return plain.backward(logits, facts, norm)


def _launch(
    logits: mx.array,
    facts: Facts,
    requested: Collection[str],
    known: mx.array | None = None,
    upstream: mx.array | None = None,
) -> Results:
    """Launch the kernel with one threadgroup per row, and return the results, not yet evaluated."""
    count, dtype = len(logits), logits.dtype
    arguments: dict[str, mx.array | None] = {name: getattr(facts, name, None) for name in INPUTS}
    arguments |= {"logits": logits, "known": known, "upstream": upstream}
    if logits.size < _SMALL:
        arguments["logits"] = mx.pad(logits, [(0, _SMALL), (0, 0)])
    # Placeholders for missing arguments, which are not read.
    inputs = [facts.numbers if array is None else array for array in arguments.values()]
    rows: dict[str, _Array] = {"norm": ((count, 2), mx.float32), "predictions": ((count,), mx.int32)}
    rows["grad"] = (logits.shape, dtype)
    outputs = [rows.get(name, ((count,), mx.float32)) for name in OUTPUTS]
    outputs = [
        (shape if name in requested else (1,), kind) for name, (shape, kind) in zip(OUTPUTS, outputs, strict=True)
    ]
    small = [(_small(array.shape), array.dtype) for array in inputs]
    tried = [(_small(shape), kind) for shape, kind in outputs]
    more = {"T": dtype, "SMOOTHED": facts.smooths, "CAPPED": facts.caps, "SKIPS_EXCLUDED": not facts.call.options.stats}
    template, threads = kernel_for(arguments, requested, lambda *kernel: allows(small, tried, *kernel), **more)
    results = zip(OUTPUTS, _run(inputs, outputs, template, count, threads), strict=True)
    return {name: array for name, array in results if name in requested}


def _run(inputs: list[mx.array], outputs: list[_Array], template: Template, rows: int, threads: int) -> Any:
    return mlx_kernel()(
        inputs=inputs,
        template=list(template.items()),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
        grid=(threads, rows, 1),
        threadgroup=(threads, 1, 1),
    )


def allows(inputs: list[_Array], outputs: list[_Array], template: Template, threads: int) -> bool:
    """Whether the kernel can run with this number of threads; KernelError if it cannot run with any number."""
    key = (tuple(inputs), tuple(template.items()), threads)
    if key not in _tried:
        try:
            mx.eval(_run([mx.zeros(*array) for array in inputs], outputs, template, 1, threads))
            _tried[key] = True
        except (RuntimeError, ValueError) as error:
            # MLX says "Thread group size (512) is greater than the maximum allowed threads per threadgroup (384)."
            _tried[key] = False if "thread group size" in str(error).lower() else KernelError(error)
    outcome = _tried[key]
    if isinstance(outcome, KernelError):
        raise outcome
    return outcome


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(size, _SMALL) for size in shape)


def _warn(error: KernelError) -> None:
    """Warn that MLX's operations replace a kernel that cannot run on this GPU, and why."""
    text = f"{error}. MLX's operations take the place of the kernel, and results stay correct"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
