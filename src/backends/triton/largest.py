"""The k largest logits of rows and the logarithms of their sums, in two launches."""

import torch
from torch import Tensor

from xent.backends.torch.contract import LARGEST
from xent.backends.triton.kernels.largest_kernels import largest_kernel, maxima_kernel
from xent.backends.triton.launches import cdiv, launch, next_power_of_2
from xent.core.call import Activation

__all__ = ["largest"]

_BLOCK = 64  # classes
_BLOCKS = 64  # that a program reads at a time
_MAXIMA_WARPS = 4
_CANDIDATES = 512  # that a warp selects from


def largest(z: Tensor, k: int, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """See `xent.backends.torch.contract.LARGEST`."""
    (rows, classes), cap, device = z.shape, activation.softcap, z.device
    maxima = z.new_empty(rows, cdiv(classes, _BLOCK))
    ids, top = (torch.empty(rows, k, dtype=dtype, device=device) for dtype in (torch.int64, torch.float32))
    log_sums = torch.empty(rows, dtype=torch.float32, device=device)
    aligned = (z.data_ptr() | (z.stride(0) * z.itemsize)) % 16 == 0 and classes % 8 == 0
    constants = {"BLOCK": _BLOCK, "BLOCKS": _BLOCKS, "CAPPED": cap is not None, "ALIGNED": aligned}
    numbers = float(activation.logit_scale), 1.0 if cap is None else float(cap)
    of_logits = z, z.stride(0), classes
    launch(maxima_kernel, rows, (*of_logits, maxima, log_sums, *numbers), constants, num_warps=_MAXIMA_WARPS)
    size, places = next_power_of_2(maxima.shape[1]), next_power_of_2(k)
    constants = {"BLOCK": _BLOCK, "SIZE": size, "PLACES": places, "BITS": 16 if z.dtype == torch.bfloat16 else 32}
    warps = min(max(size, places * _BLOCK, 2 * _CANDIDATES) // _CANDIDATES, 16)
    launch(largest_kernel, rows, (*of_logits, k, maxima, ids, top), constants, num_warps=warps)
    return ids, top, log_sums


LARGEST["triton"] = largest
