"""Whether the sum kernel adds a product to a sum, and how it is launched."""

import torch
import triton
from torch import Tensor

from xent.backends.triton.hopper import can_be_copied, hopper_multiprocessors

__all__ = ["RELEASES", "add_product"]

RELEASES = ((3, 6),)
_HALF = 64  # rows of a tile that a consumer has
_WIDTH = 256  # of a tile
_DEPTH = 64  # rows of both factors in a slot
_SLOTS = 3
_WARPS = 4
_ENTRY_REGISTERS = 168  # of each thread of three groups of four warps, before they are dealt out
_REGISTERS = 240
_FEWEST_ROWS = 1536  # of less a library's sum is faster, though it rounds more


def add_product(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Add left (V, R) @ right (R, D) to total (V, D) in place; False where that is not served.

    The sum of a product's terms is float32, as a library's is; so is what is added to it, before it is rounded.
    """
    left = left.t()
    if not _serves(total, left, right):
        return False
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from xent.backends.triton.sum_kernel import sum_kernel

    (rows, width), vocabulary = right.shape, len(total)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    across = triton.cdiv(width, _WIDTH)
    tiles = triton.cdiv(vocabulary, 2 * _HALF) * across
    sum_kernel[(min(hopper_multiprocessors(total.device.index, RELEASES), tiles),)](
        TensorDescriptor(left, [rows, vocabulary], [left.stride(0), 1], [_DEPTH, _HALF], layout),
        TensorDescriptor(right, [rows, width], [right.stride(0), 1], [_DEPTH, _WIDTH], layout),
        TensorDescriptor(total, [vocabulary, width], [total.stride(0), 1], [_HALF, _WIDTH], layout),
        tiles,
        across,
        triton.cdiv(rows, _DEPTH),
        SLOTS=_SLOTS,
        REGISTERS=_REGISTERS,
        num_warps=_WARPS,
        maxnreg=_ENTRY_REGISTERS,
    )
    return True


def _serves(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether total (V, D), left (R, V) and right (R, D) are of a kind and size for the kernel."""
    if total.device.type != "cuda" or not hopper_multiprocessors(total.device.index, RELEASES):
        return False
    if not total.dtype == left.dtype == right.dtype == torch.bfloat16:
        return False
    return len(right) >= _FEWEST_ROWS and all(map(can_be_copied, (total, left, right)))
