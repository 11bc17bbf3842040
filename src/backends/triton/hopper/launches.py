"""Launches of the Gluon kernels for Hopper GPUs, and the matrices that their copy engine supports."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from xent.backends.triton.machine import multiprocessors
from xent.backends.triton.prepared import cdiv, launch

__all__ = ["BAND", "CLASSES", "GROUP", "can_be_copied", "copyable", "fold_chunks", "walk", "write_gradient"]

BAND = 128  # rows of a tile
CLASSES = 256  # classes of a tile
_DEPTH = 64  # width of a slice of both factors: 128 bytes, which the copy engine can swizzle
_SLOTS = 4
_WARPS = 4
_ENTRY_REGISTERS = 168  # registers per thread at entry, for three groups of four warps, before they are redistributed
_REGISTERS = 240
GROUP = 12  # bands computed at the same time, so that their rows and the classes that they share stay in the L2 cache
_MOST_CHUNKS = 320  # chunks of the vocabulary, each with its own sums


def fold_chunks(
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    bend: tuple[float | None, float | None],
    entropy: bool,
) -> Tensor:
    """Return the sums of hidden states (R, D) over chunks of the classes, (2 or 3, chunks, R) float32.

    They are the largest x, the sum of e = e^(x - largest), and with `entropy` the sum of e log2 e, without the class
    `classes` (R,) int32. Logits stay in registers in float32. `bend` is (logit scale or None, softcap or None).
    """
    from xent.backends.triton.hopper.product_kernel import product_kernel

    made = hidden.new_empty(3 if entropy else 2, walk(1, weight)[2], len(hidden), dtype=torch.float32)
    arguments = classes, made[0], made[1], made[-1], len(hidden), len(weight)
    _launch(product_kernel, hidden, weight, arguments, bend, {"ENTROPY": entropy})
    return made


def write_gradient(
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    coefficients: Tensor,
    grad: Tensor,
    bend: tuple[float | None, float | None],
    tilted: bool,
) -> None:
    """Write the gradient (R, 8n) of the logits of hidden states (R, D); 0 in columns beyond the vocabulary.

    `classes` (R,) int32, -2 in rows without a gradient. `coefficients` (4 or more, R) float32: m, factor, the target's
    gradient, tilt.
    """
    from xent.backends.triton.hopper.gradient_product_kernel import gradient_product_kernel

    arguments = classes, coefficients, grad, len(hidden), len(weight), grad.stride(0) // 8
    _launch(gradient_product_kernel, copyable(hidden), weight, arguments, bend, {"TILTED": tilted})


def _launch(
    kernel: Any,
    hidden: Tensor,
    weight: Tensor,
    arguments: tuple[Any, ...],
    bend: tuple[float | None, float | None],
    other: dict[str, bool],
) -> None:
    factors = _descriptor(hidden, [BAND // 2, _DEPTH]), _descriptor(weight, [CLASSES, _DEPTH])
    numbers = [0.0 if number is None else number for number in bend]
    scaled, capped = (number is not None for number in bend)
    launch(
        kernel,
        multiprocessors(hidden.device),
        (*factors, *arguments, *walk(len(hidden), weight), *numbers),
        {"SLOTS": _SLOTS, "SCALED": scaled, "CAPPED": capped, **other, "REGISTERS": _REGISTERS},
        num_warps=_WARPS,
        maxnreg=_ENTRY_REGISTERS,
    )


def walk(rows: int, classifier: Tensor) -> tuple[int, int, int, int, int, int]:
    """Return (units, group, chunks, tiles per chunk, tiles per row, slices of the width).

    The chunks depend on the vocabulary only.
    """
    vocabulary, width = classifier.shape
    tiles = cdiv(vocabulary, CLASSES)
    of_chunk = cdiv(tiles, _MOST_CHUNKS)
    chunks = cdiv(tiles, of_chunk)
    return cdiv(rows, BAND) * chunks, GROUP, chunks, of_chunk, tiles, cdiv(width, _DEPTH)


def can_be_copied(matrix: Tensor) -> bool:
    """Return whether the copy engine supports a matrix: 16-bit elements, rows at multiples of 16 bytes, no overlap."""
    if matrix.dtype not in (torch.bfloat16, torch.float16):
        return False
    pitch, width = matrix.stride(0), matrix.shape[1]
    aligned = matrix.stride(1) == 1 and pitch * matrix.itemsize % 16 == 0 and matrix.data_ptr() % 16 == 0
    return aligned and 0 < width <= pitch


def copyable(matrix: Tensor) -> Tensor:
    """Return the matrix, or a contiguous copy if the copy engine does not support the matrix itself."""
    return matrix if can_be_copied(matrix) else matrix.clone(memory_format=torch.contiguous_format)


def _descriptor(matrix: Tensor, block: list[int]) -> Any:
    """Return the copy engine's descriptor of a matrix. Rows of a block are swizzled by 128 bytes in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], block, _layout(8 * matrix.itemsize))


@cache
def _layout(bits: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
