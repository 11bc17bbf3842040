"""The k largest logits of rows, and how many are larger than the target's: the launches of their kernels."""

import torch
from torch import Tensor

from xent.backends.torch.contract import COUNT_ABOVE, LARGEST
from xent.backends.triton.kernels.largest_kernels import count_above_kernel, largest_kernel, maxima_kernel
from xent.backends.triton.launches import cdiv, launch, next_power_of_2
from xent.core.call import Activation

__all__ = ["count_above", "largest"]

_BLOCK = 64  # classes
_BLOCKS = 32  # that a program reads at a time
_WARPS = 4  # of a program that reads
_SELECTED = 512  # numbers that a warp selects from


def largest(z: Tensor, k: int, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """See `xent.backends.torch.contract.LARGEST`."""
    rows, classes = z.shape
    cap = activation.softcap
    maxima = z.new_empty(rows, cdiv(classes, _BLOCK))
    ids, top = (torch.empty(rows, k, dtype=dtype, device=z.device) for dtype in (torch.int64, torch.float32))
    log_sums = torch.empty(rows, dtype=torch.float32, device=z.device)
    of_logits = z, z.stride(0), classes
    arguments = *of_logits, maxima, log_sums, float(activation.logit_scale), 1.0 if cap is None else float(cap)
    constants = {"BLOCK": _BLOCK, "BLOCKS": _BLOCKS, "CAPPED": cap is not None, "ALIGNED": _is_aligned(z)}
    launch(maxima_kernel, rows, arguments, constants, num_warps=_WARPS)
    size, places = next_power_of_2(maxima.shape[1]), next_power_of_2(k)
    constants = {"BLOCK": _BLOCK, "SIZE": size, "PLACES": places, "BITS": 16 if z.dtype == torch.bfloat16 else 32}
    warps = min(max(size, places * _BLOCK, 2 * _SELECTED) // _SELECTED, 16)
    launch(largest_kernel, rows, (*of_logits, k, maxima, ids, top), constants, num_warps=warps)
    return ids, top, log_sums


def count_above(z: Tensor, of_target: Tensor, scale: float) -> Tensor:
    """See `xent.backends.torch.contract.COUNT_ABOVE`."""
    counts = torch.empty(len(z), dtype=torch.int64, device=z.device)
    arguments = z, z.stride(0), z.shape[1], of_target, counts, 1.0 if scale > 0 else -1.0
    constants = {"BLOCK": _BLOCK * _BLOCKS, "ALIGNED": _is_aligned(z)}
    launch(count_above_kernel, len(z), arguments, constants, num_warps=_WARPS)
    return counts


def _is_aligned(z: Tensor) -> bool:
    """Return whether rows consist of whole vectors of 16 bytes."""
    return (z.data_ptr() | (z.stride(0) * z.itemsize)) % 16 == 0 and z.shape[1] % 8 == 0


COUNT_ABOVE["triton"] = count_above
LARGEST["triton"] = largest
