"""Access to a tensor (..., V) of any strides as N rows of V, without copying it as a whole."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xent.core.chunks import rows_per_block

__all__ = ["Rows", "cast", "gradient_like", "is_dense", "logit_blocks", "overlaps", "row_sum", "shifted", "span"]

_ALIGNED = 8  # elements, 16 bytes of the 16-bit dtypes
_FEW_PIECES = 16
_LARGE_PIECE = 2**14  # elements: copying less costs no more than a view's own operations


class Rows:
    """The rows of a tensor in row-major order of its leading axes, accessed in blocks.

    If the leading axes do not merge into one stride (a class axis in the middle, an expanded batch), the rows form
    pieces of equal length. A view never crosses from one piece into the next; blocks of many small pieces are copies.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.count = tensor.shape[:-1].numel()
        self._tensor = tensor
        pieces = [tensor.unsqueeze(0) if tensor.dim() == 1 else tensor] if self.count else []
        while pieces and not _merges(pieces[0]):
            if len(pieces) * len(pieces[0]) > _FEW_PIECES and pieces[0][0].numel() < _LARGE_PIECE:
                pieces = []
            else:
                pieces = [part for piece in pieces for part in piece.unbind(0)]
        self._pieces = [
            piece if piece.dim() == 2 else piece.view(piece.shape[:-1].numel(), piece.shape[-1]) for piece in pieces
        ]
        self.copies = bool(self.count) and not pieces
        """Whether every block is a copy, which must be written back with `put`."""

    def blocks(self, most: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, (R, V)) with R at most `most`, over all rows."""
        if self.copies:
            for start in range(0, self.count, most):
                yield start, self.block(start, min(start + most, self.count))
            return
        start = 0
        for piece in self._pieces:
            for block in (piece,) if len(piece) <= most else piece.split(most):
                yield start, block
                start += block.shape[0]

    def block(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop): a view if they are in one piece, otherwise a copy."""
        if self.copies:
            return self._tensor[self._places(start, stop)]
        length = self._pieces[0].shape[0]
        parts = []
        while start < stop:
            piece, first = divmod(start, length)
            last = min(first + stop - start, length)
            whole = self._pieces[piece]
            parts.append(whole if last - first == length else whole[first:last])
            start += last - first
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def view(self, start: int, stop: int) -> Tensor | None:
        """Return rows [start, stop) without a copy, or None if that is not possible, or their classes have gaps."""
        if self.copies or not _has_contiguous_rows(self._tensor):
            return None
        length = self._pieces[0].shape[0]
        return self.block(start, stop) if start // length == (stop - 1) // length else None

    def put(self, start: int, values: Tensor) -> None:
        """Write values (R, V) to the rows from `start` on."""
        if self.copies:
            self._tensor[self._places(start, start + len(values))] = values
            return
        length, done = self._pieces[0].shape[0], 0
        while done < len(values):
            piece, first = divmod(start + done, length)
            size = min(length - first, len(values) - done)
            self._pieces[piece][first : first + size] = values[done : done + size]
            done += size

    def take(self, rows: Tensor) -> Tensor:
        """Return a copy of these rows, given as indices (M,) int64. The host does not read the indices."""
        return self._tensor[torch.unravel_index(rows, self._tensor.shape[:-1])]

    def _places(self, start: int, stop: int) -> tuple[Tensor, ...]:
        return torch.unravel_index(torch.arange(start, stop, device=self._tensor.device), self._tensor.shape[:-1])


def _merges(tensor: Tensor) -> bool:
    """Whether all leading axes merge into one without a copy."""
    if tensor.is_contiguous():
        return True
    expected = None
    for size, stride in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = stride * size
    return True


def logit_blocks(logits: Tensor, grad: Tensor | None) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield (first row, block of logits, memory for its gradient), with contiguous class axes.

    Where the classes of a row are not contiguous, or rows lie in many small pieces, the block is a copy, and its
    gradient is copied back afterwards.
    """
    vocabulary = logits.shape[-1]
    if logits.is_contiguous() and (grad is None or grad.is_contiguous()) and logits.numel():
        if logits.dim() != 2:
            logits, grad = logits.view(-1, vocabulary), None if grad is None else grad.view(-1, vocabulary)
        yield 0, logits, grad
        return
    rows, places = Rows(logits), None if grad is None else Rows(grad)
    copies = rows.copies or not _has_contiguous_rows(logits)
    most = max(rows.count, 1)
    if copies:
        most = rows_per_block(max(vocabulary, 1), logits.itemsize, logits.device.type, torch.get_num_threads())
    space: Tensor | None = None
    for start, block in rows.blocks(most):
        if copies:
            space = torch.empty(block.shape, dtype=block.dtype, device=block.device) if space is None else space
            block = space[: len(block)].copy_(block)  # the first block is the largest
        place = None if places is None else places.view(start, start + len(block))
        if places is None or place is not None:
            yield start, block, place
        else:
            place = block if copies else torch.empty_like(block)
            yield start, block, place
            places.put(start, place)


def _has_contiguous_rows(tensor: Tensor) -> bool:
    return tensor.shape[-1] == 1 or tensor.stride(-1) == 1


def gradient_like(logits: Tensor) -> Tensor:
    """Allocate memory for the gradient: with the logits' strides if these leave no gaps, otherwise contiguous."""
    if is_dense(logits):
        return torch.empty_like(logits)
    if logits.shape[-1] % _ALIGNED and logits.stride(-1) == 1 and _has_small_gaps(logits):
        # Rows are not aligned to 16 bytes: vector loads and stores need the same alignment in logits and gradient.
        return torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _has_small_gaps(tensor: Tensor) -> bool:
    """Whether elements do not overlap, and a tensor with these strides takes little more memory than its elements."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(4 * extent <= 5 * math.prod(tensor.shape)) and not overlaps(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one range of memory without gaps or overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


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


def shifted(values: Tensor, shift: int, fill: Any) -> Tensor:
    """Return an array with values[..., t + shift] at t, and `fill` past the end."""
    if not shift:
        return values
    kept = max(values.shape[-1] - shift, 0)
    moved = torch.full_like(values, fill)
    moved[..., :kept] = values[..., shift:]
    return moved
