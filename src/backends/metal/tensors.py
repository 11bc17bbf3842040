"""Launch the Metal kernels for a block of PyTorch logits, through `torch.mps.compile_shader`.

Different from MLX's launcher, the signatures are ours, rows may have any stride, results are written to given memory,
and the gradient may overwrite the logits. A kernel is compiled for each combination of template arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xent.backends.metal.failures import KernelError
from xent.backends.metal.sources import library
from xent.backends.metal.threads import LIMITS, threads_and_held

__all__ = ["RowResults", "RowTensors", "backward", "forward", "kernels_that_ran"]

_TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
_compiled: dict[tuple[str, tuple[str, ...]], Any] = {}
_ran: set[str] = set()


@dataclass(frozen=True, eq=False)
class RowTensors:
    """The facts of R rows of V raw logits, as tensors on the logits' device; floats are float32 unless noted."""

    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    target: Tensor | None
    """(R,) int64 in [0, V), also for ignored rows; None for class probabilities."""
    target_logits: Tensor | None
    """(R,) raw logits of the targets, which replace those in the block."""
    probabilities: Tensor | None
    """(R, V), float32, float16 or bfloat16, the last axis contiguous."""
    class_weight: Tensor | None
    """(V,), contiguous."""
    total_weight: Tensor | None
    """0-d, the sum of `class_weight`."""
    bend: Tensor | None
    """(R, 2), the last axis contiguous: logit_scale and softcap of each row, which replace those for all rows."""
    weight: Tensor
    """(R,) a_i, the factor of the loss; NaN makes the row's loss NaN."""
    scale: Tensor
    """(R,) the factor of the gradient."""
    dead: Tensor
    """(R,) bool: rows whose loss and gradient are exactly 0."""


@dataclass(frozen=True, eq=False)
class RowResults:
    """Memory for the results of R rows; None for those that are not needed. All are contiguous except `norm`."""

    loss: Tensor
    """(R,) float32, including z-loss and row weight."""
    norm: Tensor | None = None
    """(2, R) float32 of any strides: the largest x, and log sum_c exp(x_c - largest)."""
    nll: Tensor | None = None
    """(R,) float32"""
    entropy: Tensor | None = None
    """(R,) float32"""
    predictions: Tensor | None = None
    """(R,) int64"""
    log_sum_sq_probs: Tensor | None = None
    """(R,) float32"""
    mean_logit: Tensor | None = None
    """(R,) float32"""
    grad: Tensor | None = None
    """(R, V), the logits' dtype, the last axis contiguous; may be the logits."""


def forward(logits: Tensor, rows: RowTensors, results: RowResults, skips_dead: bool) -> None:
    """Fill the results from logits (R, V), R and V >= 1, the last axis contiguous; KernelError if no kernel runs.

    `skips_dead`: no statistics of dead rows are needed, so that their logits are not read.
    """
    vocabulary, loss = logits.shape[1], results.loss
    asked = (
        results.entropy,
        results.nll,
        results.predictions,
        results.log_sum_sq_probs,
        results.mean_logit,
        results.norm,
        results.grad,
    )
    kind = [*_kind(logits, rows), *(result is not None for result in asked), skips_dead]

    def kernel_within(limit: int) -> tuple[Any, int]:
        threads, held = threads_and_held(vocabulary, logits.itemsize, limit)
        return _kernel("forward", _arguments([*kind, held if results.grad is not None else 1])), threads

    kernel, threads = _fitting("forward", kernel_within)
    kernel(
        logits,
        *_inputs(logits, rows),
        rows.weight,
        rows.scale,
        rows.dead,
        loss,
        *(loss if result is None else result for result in _outputs(results)),
        *_sizes(logits, rows, results.norm, results.grad),
        threads=(threads, len(logits)),
        group_size=(threads, 1),
    )


def backward(logits: Tensor, rows: RowTensors, norm: Tensor, upstream: Tensor | None, grad: Tensor) -> None:
    """Write the gradient (R, V), which may overwrite the logits, from the norm (2, R); KernelError as in `forward`.

    `upstream` (R, 4), contiguous, has the gradients of lse, nll and entropy, and the entropy.
    """

    def kernel_within(limit: int) -> tuple[Any, int]:
        threads, _ = threads_and_held(logits.shape[1], logits.itemsize, limit)
        return _kernel("backward", _arguments([*_kind(logits, rows), upstream is not None])), threads

    kernel, threads = _fitting("backward", kernel_within)
    kernel(
        logits,
        *_inputs(logits, rows),
        rows.scale,
        rows.dead,
        norm,
        norm if upstream is None else upstream,
        grad,
        *_sizes(logits, rows, norm, grad),
        threads=(threads, len(logits)),
        group_size=(threads, 1),
    )


def kernels_that_ran() -> set[str]:
    """Return the names of the kernels that have run in this process, each with the limits of its pipelines."""
    return set(_ran)


def _fitting(name: str, kernel_within: Callable[[int], tuple[Any, int]]) -> tuple[Any, int]:
    """Return the kernel for the largest number of threads that its pipeline allows, and the threads per row."""
    for limit in LIMITS:
        kernel, threads = kernel_within(limit)
        if kernel.max_threads_per_threadgroup >= limit:
            _ran.add(f"{name} with {limit} threads")
            return kernel, threads
    raise KernelError(f"its pipeline allows fewer than {LIMITS[-1]} threads a threadgroup")


def _kernel(name: str, arguments: tuple[str, ...]) -> Any:
    """Return a kernel. Each is compiled at most once."""
    key = (name, arguments)
    if key not in _compiled:
        try:
            _compiled[key] = getattr(torch.mps.compile_shader(library(name, arguments)), f"xent_{name}")
        except (RuntimeError, SyntaxError) as error:  # PyTorch raises SyntaxError for errors of Metal's compiler
            _compiled[key] = KernelError(str(error))
    found = _compiled[key]
    if isinstance(found, KernelError):
        raise found
    return found


def _kind(logits: Tensor, rows: RowTensors) -> list[Any]:
    return [
        logits.dtype,
        torch.float32 if rows.probabilities is None else rows.probabilities.dtype,
        rows.target is not None,
        rows.target_logits is not None,
        rows.class_weight is not None,
        rows.label_smoothing != 0,
        rows.softcap is not None,
        rows.bend is not None,
    ]


def _arguments(kind: list[Any]) -> tuple[str, ...]:
    """Return the template arguments as Metal source text."""
    return tuple(str(value).lower() if isinstance(value, bool) else _TYPES.get(value, str(value)) for value in kind)


def _inputs(logits: Tensor, rows: RowTensors) -> list[Tensor]:
    """Return the optional inputs in the kernels' order. Placeholders for missing ones are not read."""
    given = (rows.target, rows.target_logits, rows.probabilities, rows.class_weight, rows.total_weight, rows.bend)
    return [logits if tensor is None else tensor for tensor in given]


def _outputs(results: RowResults) -> list[Tensor | None]:
    """Return the memory for the results other than the loss, in the kernel's order."""
    return [
        results.norm,
        results.nll,
        results.entropy,
        results.predictions,
        results.log_sum_sq_probs,
        results.mean_logit,
        results.grad,
    ]


def _sizes(logits: Tensor, rows: RowTensors, norm: Tensor | None, grad: Tensor | None) -> list[int | float]:
    """Return the numbers that are a kernel's last arguments: int64, then float32."""
    vocabulary = logits.shape[1]
    sizes = [
        vocabulary,
        logits.stride(0),
        0 if grad is None else grad.stride(0),
        0 if rows.probabilities is None else rows.probabilities.stride(0),
        0 if norm is None else norm.stride(1),
        0 if norm is None else norm.stride(0),
        0 if rows.bend is None else rows.bend.stride(0),
    ]
    numbers = (rows.label_smoothing, rows.z_loss, rows.softcap or 0.0, rows.logit_scale)
    return [*sizes, *map(float, numbers), rows.label_smoothing / vocabulary]
