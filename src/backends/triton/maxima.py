"""Launches of the kernel of the k most probable classes."""

import torch
from torch import Tensor

from xent.backends.torch.contract import MAXIMA
from xent.backends.torch.top_k import BLOCK
from xent.backends.triton.kernels.maxima_kernel import maxima_kernel
from xent.backends.triton.launches import cdiv, launch
from xent.core.call import Activation

__all__ = ["maxima"]

_BLOCKS = 128  # of a program


def maxima(z: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return the maxima of blocks and the logarithms of sums: see `xent.backends.torch.contract.MAXIMA`."""
    (rows, classes), cap = z.shape, activation.softcap
    parts = cdiv(classes, BLOCK * _BLOCKS)
    of_blocks = z.new_empty(rows, cdiv(classes, BLOCK))
    sums = torch.empty(rows, parts, 2, dtype=torch.float32, device=z.device)
    numbers = float(activation.logit_scale), 1.0 if cap is None else float(cap)
    aligned = (z.data_ptr() | (z.stride(0) * z.itemsize)) % 16 == 0 and classes % 8 == 0
    constants = {"BLOCK": BLOCK, "BLOCKS": _BLOCKS, "CAPPED": cap is not None, "ALIGNED": aligned}
    arguments = z, z.stride(0), classes, parts, of_blocks, sums, *numbers
    launch(maxima_kernel, rows * parts, arguments, constants, num_warps=4)
    largest, totals = sums.unbind(-1)
    peak = largest.masked_fill(totals == 0, -torch.inf).amax(-1, keepdim=True)
    total = torch.where(totals == 0, 0, totals * (largest - peak).exp()).sum(-1)
    return of_blocks, total.masked_fill_(total == 0, 1).log_()


MAXIMA["triton"] = maxima
