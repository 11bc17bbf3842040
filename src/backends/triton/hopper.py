"""Where the kernels written in Gluon run: on Hopper GPUs, by releases of Triton on which they were tried."""

import re
from functools import cache

import torch
import triton

from xent.backends.triton.machine import DEVICES

__all__ = ["multiprocessors"]

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
