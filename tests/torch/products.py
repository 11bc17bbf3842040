"""Count the multiplications of matrix products inside a call, with PyTorch's profiler."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["flops_of"]

_PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::mv",
    "aten::addmv",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_addmm_activation",
)


def flops_of(function: Callable[[], Any]) -> int:
    """Return the multiplications and additions of all matrix products of a call, on the CPU and on a GPU.

    Unlike a FlopCounterMode, the profiler sees operations inside of custom operations and does not change the call.
    """
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profiler:
        function()
    return sum(_flops(event) for event in profiler.events() if event.name in _PRODUCTS)


def _flops(event: Any) -> int:
    """Return 2 m n k for a product of (m, k) and (k, n), also in batches."""
    shapes = [shape for shape in event.input_shapes if len(shape) >= 1]
    if "add" in event.name:
        shapes = shapes[1:]
    left, right = shapes[:2]
    found = 2
    for size in left:
        found *= size
    return found * (right[-1] if len(right) > 1 else 1)
