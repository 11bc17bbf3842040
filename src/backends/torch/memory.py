"""Access to a tensor (..., V) of any strides as N rows of V, without copying it as a whole."""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "RowView",
    "block_rows",
    "cast",
    "gradient_like",
    "is_dense",
    "logit_blocks",
    "overlaps",
    "row_sum",
    "span",
]

# A block should stay in the caches of the cores during all passes over it.
_BYTES_PER_THREAD, _BYTES_CPU, _BYTES_ACCELERATOR = 2**21, 2**23, 2**28
_LARGE_PIECE = 2**14  # elements: copying less costs no more than a view's own operations


class RowView:
    """The rows of a tensor (..., V) in row-major order of its leading axes."""

    def __init__(self, tensor: Tensor) -> None:
        self.count, self._tensor = tensor.shape[:-1].numel(), tensor
        self.flat: Any = None
        """(N, V), a view of all rows; None if there is none, as with classes in the middle, or of an expanded batch."""
        with suppress(RuntimeError):
            self.flat = tensor.view(self.count, tensor.shape[-1])
        self.are_direct = self.flat is not None and (tensor.shape[-1] == 1 or tensor.stride(-1) == 1)
        """Whether it has contiguous classes."""

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        """Return rows (R, V), given as a slice or as indices (R,) int64, which the host does not read."""
        tensor, places = self._indexed(index)
        return tensor[places]

    def __setitem__(self, index: slice, block: Tensor) -> None:
        tensor, places = self._indexed(index)
        tensor[places] = block

    def _indexed(self, index: slice | Tensor) -> tuple[Tensor, Any]:
        """Return a tensor, and what indexes these rows in it."""
        if self.flat is not None:
            return self.flat, index
        if isinstance(index, slice):
            index = torch.arange(index.start, index.stop, device=self._tensor.device)
        return self._tensor, torch.unravel_index(index, self._tensor.shape[:-1])


def logit_blocks(
    logits: Tensor, grad: Tensor | None, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield (first row, block of logits, memory for its gradient) of rows [start, stop), with contiguous class axes.

    The blocks are views if the rows lie in one or several large pieces. Otherwise they are copies, each of which is
    overwritten by its gradient, and that is copied back afterwards.
    """
    rows, places = RowView(logits), None if grad is None else RowView(grad)
    stop, size = rows.count if stop is None else stop, logits.shape[1:-1].numel()
    if rows.are_direct and (places is None or places.are_direct):
        yield start, span(rows.flat, start, stop), None if places is None else span(places.flat, start, stop)
    elif logits.dim() > 2 and size * logits.shape[-1] >= _LARGE_PIECE:
        for piece in range(start // size, -(-stop // size)):
            before, more = piece * size, None if grad is None else grad[piece]
            inside = max(start - before, 0), min(stop - before, size)
            for first, view, place in logit_blocks(logits[piece], more, *inside):
                yield before + first, view, place
    elif stop - start == rows.count <= block_rows(logits, logits.dtype):
        whole = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device).copy_(logits)
        block = whole.view(rows.count, logits.shape[-1])
        yield start, block, None if grad is None else block
        if grad is not None:
            grad.copy_(whole)
    else:
        most = block_rows(logits, logits.dtype)
        space = torch.empty(most, logits.shape[-1], dtype=logits.dtype, device=logits.device)
        for first in range(start, stop, most):
            index = slice(first, min(first + most, stop))
            block = space[: stop - first].copy_(rows[index])
            yield first, block, None if grad is None else block
            if places is not None:
                places[index] = block


def block_rows(tensor: Tensor, dtype: torch.dtype, width: int = 0) -> int:
    """Return the rows of a block of a tensor (..., V) that is converted to `dtype`, or takes `width` elements a row."""
    budget = min(_BYTES_PER_THREAD * torch.get_num_threads(), _BYTES_CPU) if tensor.is_cpu else _BYTES_ACCELERATOR
    return max(budget // (max(width or tensor.shape[-1], 1) * dtype.itemsize), 1)


def gradient_like(logits: Tensor) -> Tensor:
    """Allocate memory for the gradient: with the logits' strides if these leave small gaps, otherwise contiguous.

    Vector loads and stores of rows that are not aligned to 16 bytes need the same alignment in logits and gradient.
    """
    if logits.is_contiguous():
        return torch.empty_like(logits)
    if 4 * _extent(logits) > 5 * math.prod(logits.shape) or overlaps(logits):
        return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)


def _extent(tensor: Tensor) -> int:
    """Return the elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one range of memory without gaps or overlaps, in any order."""
    return tensor.is_contiguous() or (_extent(tensor) == tensor.numel() and not overlaps(tensor))


def overlaps(tensor: Tensor) -> bool:
    """Whether elements may overlap in memory, as in expanded tensors and sliding windows."""
    extent = 0
    if 0 in tensor.shape:
        return False
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= extent:
                return True
            extent += (size - 1) * stride
    return False


def row_sum(block: Tensor) -> Tensor:
    """Sum a block (R, V) over V, so that a row's sum does not depend on R.

    On the CPU, PyTorch splits the sum of a single long row among threads, but not the sums of several rows; so a single
    row is summed as two rows. On CUDA the order of additions depends on R and on the row's address; summing in float64
    hides it, because the result is rounded to float32.
    """
    if block.device.type == "cuda":
        return block.sum(-1, dtype=torch.float64).to(block.dtype)
    return block.sum(-1) if block.shape[0] > 1 else block.expand(2, -1).sum(-1)[:1]


def span(array: Tensor, start: int, stop: int) -> Tensor:
    """Return values[start:stop], without an operation if these are all rows."""
    return array if stop - start == array.shape[0] else array[start:stop]


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in `dtype`, without an operation if they have it."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
