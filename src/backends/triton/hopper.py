"""Where the kernels written in Gluon run, on Hopper GPUs by the releases of Triton that each was tried on."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from xent.backends.triton.machine import DEVICES, release

__all__ = ["Releases", "can_be_copied", "copyable", "descriptor", "hopper_multiprocessors"]

Releases = tuple[tuple[int, int], ...]
_HOPPER = 9


@cache
def hopper_multiprocessors(index: int, releases: Releases) -> int:
    """Return how many a Hopper GPU has, 0 for another GPU, Triton's interpreter or another release than these.

    Gluon, Triton's lower-level language, is not yet stable.
    """
    device = torch.cuda.get_device_properties(index)
    serves = device.major == _HOPPER and release() in releases and DEVICES == ("cuda",)
    return device.multi_processor_count if serves else 0


def can_be_copied(matrix: Tensor) -> bool:
    """Whether the copy engine takes a matrix: 16 bits an element, on boundaries of 16 bytes, none sharing memory."""
    if matrix.dtype not in (torch.bfloat16, torch.float16):
        return False
    pitch, width = matrix.stride(0), matrix.shape[1]
    aligned = matrix.stride(1) == 1 and pitch * matrix.itemsize % 16 == 0 and matrix.data_ptr() % 16 == 0
    return aligned and 0 < width <= pitch


def copyable(matrix: Tensor) -> Tensor:
    """Return a matrix that the copy engine takes, if it takes one of that width: itself, or a copy."""
    return matrix if can_be_copied(matrix) else matrix.clone(memory_format=torch.contiguous_format)


def descriptor(matrix: Tensor, block: list[int]) -> Any:
    """Return a matrix as the copy engine takes it, in blocks whose rows are swizzled by 128 bytes in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], block, _layout(8 * matrix.itemsize))


@cache
def _layout(bits: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
