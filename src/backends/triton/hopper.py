"""Where the kernels written in Gluon run, on Hopper GPUs by releases of Triton that were tried, and what they take."""

import re
from functools import cache

import torch
import triton
from torch import Tensor

from xent.backends.triton.machine import DEVICES

__all__ = ["can_be_copied", "multiprocessors"]

# Gluon, Triton's lower-level language, is not yet stable.
_RELEASES = ((3, 6), (3, 7))
_HOPPER = 9


@cache
def multiprocessors(index: int) -> int:
    """Return how many a Hopper GPU has, 0 for another GPU, an untried Triton or its interpreter."""
    release = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))
    device = torch.cuda.get_device_properties(index)
    serves = device.major == _HOPPER and release in _RELEASES and DEVICES == ("cuda",)
    return device.multi_processor_count if serves else 0


def can_be_copied(matrix: Tensor) -> bool:
    """Whether the copy engine takes a matrix: 16 bits an element, on boundaries of 16 bytes, none sharing memory."""
    if matrix.dtype not in (torch.bfloat16, torch.float16):
        return False
    pitch, width = matrix.stride(0), matrix.shape[1]
    aligned = matrix.stride(1) == 1 and pitch * matrix.itemsize % 16 == 0 and matrix.data_ptr() % 16 == 0
    return aligned and 0 < width <= pitch
