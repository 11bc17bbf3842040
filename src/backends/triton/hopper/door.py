"""The only entry to the Gluon kernels: the GPUs and the releases of Triton that they run on."""

import os
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from xent.backends.triton.machine import DEVICES, release

__all__ = ["RELEASES", "can_be_copied", "copyable", "descriptor", "fast_path", "hopper_multiprocessors"]

RELEASES = ((3, 6), (3, 7))
"""Releases of Triton that the kernels were tested with. Gluon, Triton's lower-level language, is not stable yet."""
_HOPPER = 9


@cache
def hopper_multiprocessors(index: int) -> int:
    """Return the number of multiprocessors of a Hopper GPU; 0 if the Gluon kernels do not run on it.

    Warn if the reason is Triton's release.
    """
    reason = _closed(index)
    if reason is None:
        return torch.cuda.get_device_properties(index).multi_processor_count
    if "release" in reason:
        warnings.warn(
            f"xent uses its portable kernels on this Hopper GPU: {reason}. Results are the same; XENT_PORTABLE=1 "
            "chooses these kernels without a warning",
            RuntimeWarning,
            stacklevel=2,
        )
    return 0


def fast_path() -> str:
    """Return a sentence for `xent.backends()`: whether the Hopper kernels run on the current GPU."""
    if DEVICES != ("cuda",):
        return "Hopper kernels: off, no GPU"
    reason = _closed(torch.cuda.current_device())
    return "Hopper kernels: on" if reason is None else f"Hopper kernels: off, {reason}"


def _closed(index: int) -> str | None:
    """Return the reason why the kernels do not run on a GPU; None if they do."""
    if DEVICES != ("cuda",) or torch.version.hip is not None:
        return "Triton compiles for no NVIDIA GPU here"
    if torch.cuda.get_device_properties(index).major != _HOPPER:
        return "the GPU is no Hopper"
    if os.environ.get("XENT_PORTABLE") == "1":
        return "XENT_PORTABLE=1"
    if release() not in RELEASES:
        tried = " and ".join(".".join(map(str, each)) for each in RELEASES)
        return f"they were tried on Triton {tried}, and this is release {'.'.join(map(str, release()))}"
    return None


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


def descriptor(matrix: Tensor, block: list[int]) -> Any:
    """Return the copy engine's descriptor of a matrix. Rows of a block are swizzled by 128 bytes in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], block, _layout(8 * matrix.itemsize))


@cache
def _layout(bits: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
