"""The k largest logits of rows, and how many are larger than the target's: the launches of their kernels."""

import torch
from torch import Tensor

from xent.backends.torch.contract import COUNT_ABOVE, LARGEST
from xent.backends.triton.kernels.largest_kernels import FAN, count_above_kernel, largest_kernel, maxima_kernel
from xent.backends.triton.launches import cdiv, launch, next_power_of_2
from xent.core.call import Activation

__all__ = ["count_above", "largest"]

_BLOCKS, _STEPS = 8, 16  # large blocks that a program reads at a time, and how often
_READ = 4096  # logits that a program counts at a time
_WARPS = 4  # of a program that reads
_SELECTED, _REGISTERS = 512, 64  # numbers that a warp selects from, and registers of its threads


def largest(z: Tensor, k: int, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """See `xent.backends.torch.contract.LARGEST`."""
    (rows, classes), cap, fan = z.shape, activation.softcap, FAN.value
    small, large = (z.new_empty(rows, cdiv(classes, size)) for size in (fan, fan * fan))
    ids, top = (torch.empty(rows, k, dtype=dtype, device=z.device) for dtype in (torch.int64, torch.float32))
    parts = cdiv(large.shape[1], _BLOCKS * _STEPS)
    sums, log_sums = (torch.empty(rows, *more, dtype=torch.float32, device=z.device) for more in ((parts, 2), ()))
    read = z, z.stride(0), classes, small, large, sums, parts
    arguments = *read, float(activation.logit_scale), 1.0 if cap is None else float(cap)
    constants = {"BLOCKS": _BLOCKS, "STEPS": _STEPS, "CAPPED": cap is not None, "ALIGNED": _is_aligned(z)}
    launch(maxima_kernel, rows * parts, arguments, constants, num_warps=_WARPS)
    blocks, places = next_power_of_2(large.shape[1]), next_power_of_2(k)
    constants = {"PARTS": next_power_of_2(parts), "LARGE": blocks, "PLACES": places}
    constants["BITS"] = 16 if z.dtype == torch.bfloat16 else 32
    warps = max(blocks, places * fan, _SELECTED) // _SELECTED
    launch(largest_kernel, rows, (*read, k, ids, top, log_sums), constants, num_warps=warps, maxnreg=_REGISTERS)
    return ids, top, log_sums


def count_above(z: Tensor, of_target: Tensor) -> Tensor:
    """See `xent.backends.torch.contract.COUNT_ABOVE`."""
    counts = torch.empty(len(z), dtype=torch.int64, device=z.device)
    arguments = z, z.stride(0), z.shape[1], of_target, counts
    constants = {"BLOCK": _READ, "ALIGNED": _is_aligned(z)}
    launch(count_above_kernel, len(z), arguments, constants, num_warps=_WARPS)
    return counts


def _is_aligned(z: Tensor) -> bool:
    """Return whether rows consist of whole vectors of 16 bytes."""
    return (z.data_ptr() | (z.stride(0) * z.itemsize)) % 16 == 0 and z.shape[1] % 8 == 0


COUNT_ABOVE["triton"] = count_above
LARGEST["triton"] = largest
