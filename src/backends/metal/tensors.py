"""Launch the Metal kernels for a block of PyTorch logits, through `torch.mps.compile_shader`.

Different from MLX's launcher, the signatures are ours, rows may have any stride, results are written to given memory,
and the gradient may overwrite the logits. A kernel is compiled for each combination of template arguments.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.backends.metal.sources import KernelError, fitting, library, threads_and_held

__all__ = ["RowResults", "RowTensors", "kernels_that_ran", "launch"]

_TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
_compiled: dict[tuple[str, tuple[str, ...]], Any] = {}
_ran: set[str] = set()


class RowTensors(NamedTuple):
    """The facts of R rows: tensors in the order of signature.metal, float32 unless noted, then numbers."""

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
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0


class RowResults(NamedTuple):
    """Memory for the results of R rows, in the order of signature.metal; None for those that are not needed.

    All are contiguous except `norm`.
    """

    loss: Tensor | None = None
    """(R,) float32, including z-loss and row weight."""
    norm: Tensor | None = None
    """(2, R) float32 of any strides: the largest x, and log sum_c exp(x_c - largest). An input of `backward`."""
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


def launch(
    name: str,
    logits: Tensor,
    rows: RowTensors,
    results: RowResults,
    upstream: Tensor | None = None,
    skips_dead: bool = True,
) -> None:
    """Launch the kernel "forward" or "backward" on logits (R, V), R and V >= 1, the last axis contiguous.

    "forward" fills the results. "backward" writes the gradient, which may overwrite the logits, from the norm;
    `upstream` (R, 4), contiguous, has the gradients of lse, nll and entropy, and the entropy. `skips_dead`: no
    statistics of dead rows are needed, so that their logits are not read. KernelError if no kernel runs.
    """
    vocabulary, norm, grad = logits.shape[1], results.norm, results.grad
    kind = [
        logits.dtype,
        torch.float32 if rows.probabilities is None else rows.probabilities.dtype,
        rows.target is not None,
        rows.target_logits is not None,
        rows.class_weight is not None,
        rows.label_smoothing != 0,
        rows.softcap is not None,
        rows.bend is not None,
        *(result is not None for result in results[1:]),
        skips_dead,
        upstream is not None,
    ]

    def kernel_within(limit: int) -> Any:
        held = threads_and_held(vocabulary, logits.itemsize, limit)[1] if name == "forward" and grad is not None else 1
        return _kernel(name, _arguments([*kind, held]))

    kernel, limit = fitting(kernel_within, lambda kernel, limit: kernel.max_threads_per_threadgroup >= limit)
    _ran.add(f"{name} with {limit} threads")
    threads, _ = threads_and_held(vocabulary, logits.itemsize, limit)
    sizes = (
        vocabulary,
        logits.stride(0),
        0 if grad is None else grad.stride(0),
        0 if rows.probabilities is None else rows.probabilities.stride(0),
        0 if norm is None else norm.stride(1),
        0 if norm is None else norm.stride(0),
        0 if rows.bend is None else rows.bend.stride(0),
    )
    numbers = (rows.label_smoothing, rows.z_loss, rows.softcap or 0.0, rows.logit_scale)
    kernel(  # in the order of signature.metal; placeholders for missing tensors are not accessed
        logits,
        *(logits if tensor is None else tensor for tensor in (*rows[:9], *results)),
        *sizes,
        *map(float, numbers),
        rows.label_smoothing / vocabulary,
        logits if upstream is None else upstream,
        threads=(threads, len(logits)),
        group_size=(threads, 1),
    )


def kernels_that_ran() -> set[str]:
    """Return the names of the kernels that have run in this process, each with the limits of its pipelines."""
    return set(_ran)


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


def _arguments(kind: list[Any]) -> tuple[str, ...]:
    """Return the template arguments as Metal source text."""
    return tuple(str(value).lower() if isinstance(value, bool) else _TYPES.get(value, str(value)) for value in kind)
