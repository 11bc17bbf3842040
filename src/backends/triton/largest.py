"""The k largest logits of rows, by two kernels: the maxima of blocks of classes in one read, then a selection.

Among the block maxima, and then among the logits of the k blocks that have the largest ones, a program finds the k-th
largest number of its row bit by bit. It sorts nothing, and needs no memory for candidates.
"""

import torch
from torch import Tensor

from xent.backends.torch.contract import LARGEST
from xent.backends.torch.top_k import BLOCK
from xent.backends.torch.top_k import largest as sorted_largest
from xent.backends.triton.kernels.largest_kernels import maxima_kernel, select_largest_kernel
from xent.backends.triton.launches import cdiv, launch, next_power_of_2
from xent.core.call import Activation

__all__ = ["largest"]

_BLOCKS = 128  # of a program
_MOST = 16384  # numbers of a row that a program selects from, in registers


def largest(z: Tensor, k: int, activation: Activation) -> tuple[Tensor, Tensor]:
    """See `xent.backends.torch.contract.LARGEST`. With many classes or a large k, PyTorch sorts the maxima."""
    maxima, sums = _maxima(z, activation)
    if z.shape[1] <= k * BLOCK or max(maxima.shape[1], k * BLOCK) > _MOST:
        return sorted_largest(z, k, maxima), sums
    return _selected(z, k, _selected(maxima, k)), sums


def _maxima(z: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return the maxima of blocks, and the sums of parts."""
    (rows, classes), cap = z.shape, activation.softcap
    parts = cdiv(classes, BLOCK * _BLOCKS)
    of_blocks = z.new_empty(rows, cdiv(classes, BLOCK))
    sums = torch.empty(rows, parts, 2, dtype=torch.float32, device=z.device)
    numbers = float(activation.logit_scale), 1.0 if cap is None else float(cap)
    aligned = (z.data_ptr() | (z.stride(0) * z.itemsize)) % 16 == 0 and classes % 8 == 0
    constants = {"BLOCK": BLOCK, "BLOCKS": _BLOCKS, "CAPPED": cap is not None, "ALIGNED": aligned}
    arguments = z, z.stride(0), classes, parts, of_blocks, sums, *numbers
    launch(maxima_kernel, rows * parts, arguments, constants, num_warps=4)
    return of_blocks, sums


def _selected(logits: Tensor, k: int, blocks: Tensor | None = None) -> Tensor:
    """Return the places (R, k), in ascending order, of the k largest logits (R, M), the first among equals.

    `blocks` (R, k): only logits in these blocks are looked at.
    """
    (rows, count), width = logits.shape, 1 if blocks is None else BLOCK
    places = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    size = next_power_of_2(count if blocks is None else k * BLOCK)
    constants = {"SIZE": size, "WIDTH": width, "BITS": 16 if logits.dtype == torch.bfloat16 else 32}
    arguments = logits, logits.stride(0), count, k, blocks, places
    launch(select_largest_kernel, rows, arguments, constants, num_warps=max(size // 2048, 2))
    return places


LARGEST["triton"] = largest
