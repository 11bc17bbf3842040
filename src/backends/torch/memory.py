"""Access to a tensor (..., V) of any strides as N rows of V, without copying it as a whole."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from xent.core.chunks import rows_per_block

__all__ = [
    "Rows",
    "block_rows",
    "cast",
    "gradient_like",
    "is_dense",
    "logit_blocks",
    "overlaps",
    "row_sum",
    "span",
]

_FEW_PIECES = 16
_LARGE_PIECE = 2**14  # elements: copying less costs no more than a view's own operations


class Rows:
    """The rows of a tensor in row-major order of its leading axes, accessed in blocks.

    If the leading axes do not merge into one stride (a class axis in the middle, an expanded batch), the rows form
    pieces of equal length. A view never crosses from one piece into the next; blocks of many small pieces are copies.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.count = tensor.shape[:-1].numel()
        self._tensor, pieces = tensor, [tensor]
        while True:
            try:
                self._pieces = [piece.view(piece.shape[:-1].numel(), piece.shape[-1]) for piece in pieces]
                break
            except RuntimeError:  # its axes do not merge
                if len(pieces) * len(pieces[0]) > _FEW_PIECES and pieces[0][0].numel() < _LARGE_PIECE:
                    self._pieces = []
                    break
                pieces = [part for piece in pieces for part in piece.unbind(0)]
        self.pieces = len(self._pieces)
        self.copies = not self._pieces
        """Whether every block is a copy, which must be written back with `put`."""

    def blocks(self, start: int, stop: int, most: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, (R, V)) with R at most `most`, over the rows [start, stop)."""
        length = most if self.copies else len(self._pieces[0])
        while start < stop:
            piece, first = divmod(start, length)
            size = min(stop - start, most if self.copies else length - first, most)
            if self.copies:
                yield start, self._tensor[self._places(start, start + size)]
            else:
                yield start, span(self._pieces[piece], first, first + size)
            start += size

    def block(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop): a view if they are in one piece, otherwise a copy."""
        parts = [part for _, part in self.blocks(start, stop, stop - start)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put(self, start: int, values: Tensor) -> None:
        """Write values (R, V) to the rows from `start` on."""
        if self.copies:
            self._tensor[self._places(start, start + len(values))] = values
            return
        for first, block in self.blocks(start, start + len(values), len(values)):
            block.copy_(values[first - start : first - start + len(block)])

    def take(self, rows: Tensor) -> Tensor:
        """Return a copy of these rows, given as indices (M,) int64. The host does not read the indices."""
        return self._tensor[torch.unravel_index(rows, self._tensor.shape[:-1])]

    def _places(self, start: int, stop: int) -> tuple[Tensor, ...]:
        return torch.unravel_index(torch.arange(start, stop, device=self._tensor.device), self._tensor.shape[:-1])


def logit_blocks(
    logits: Tensor, grad: Tensor | None, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield (first row, block of logits, memory for its gradient) of rows [start, stop), with contiguous class axes.

    Where the classes of a row are not contiguous, or rows lie in many small pieces, the block is a copy, and its
    gradient is copied back afterwards.
    """
    stop = logits.shape[:-1].numel() if stop is None else stop
    if logits.dim() == 2 and logits.is_contiguous() and (grad is None or grad.is_contiguous()):
        yield start, span(logits, start, stop), None if grad is None else span(grad, start, stop)
        return
    rows, places = Rows(logits), None if grad is None else Rows(grad)
    copies, most = rows.copies or not _has_contiguous_rows(logits), max(stop - start, 1)
    if copies:
        most = block_rows(logits, logits.dtype)
    space: Tensor | None = None
    for first, block in rows.blocks(start, stop, most):
        if copies:
            space = torch.empty(block.shape, dtype=block.dtype, device=block.device) if space is None else space
            block = space[: len(block)].copy_(block)  # the first block is the largest
        if grad is None or places is None:
            yield first, block, None
        elif _has_contiguous_rows(grad) and not places.copies and places.pieces in (1, rows.pieces):
            yield first, block, places.block(first, first + len(block))
        else:
            place = block if copies else torch.empty_like(block)
            yield first, block, place
            places.put(first, place)


def block_rows(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the rows of a block of a tensor (..., V) that is converted to `dtype`."""
    return rows_per_block(max(tensor.shape[-1], 1), dtype.itemsize, tensor.device.type, torch.get_num_threads())


def _has_contiguous_rows(tensor: Tensor) -> bool:
    return tensor.shape[-1] == 1 or tensor.stride(-1) == 1


def gradient_like(logits: Tensor) -> Tensor:
    """Allocate memory for the gradient: with the logits' strides if these leave small gaps, otherwise contiguous.

    Vector loads and stores of rows that are not aligned to 16 bytes need the same alignment in logits and gradient.
    """
    if logits.is_contiguous() or 4 * _extent(logits) > 5 * math.prod(logits.shape) or overlaps(logits):
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
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
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


def span(values: Tensor, start: int, stop: int) -> Tensor:
    """Return values[start:stop], without an operation if these are all rows."""
    return values if stop - start == values.shape[0] else values[start:stop]


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in `dtype`, without an operation if they have it."""
    return values if values.dtype == dtype else values.to(dtype)
