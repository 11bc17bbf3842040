"""A (..., V) tensor seen as N rows of V, whatever its strides, without copying it as a whole."""

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["Rows", "row_sum"]


class Rows:
    """Rows of a tensor in row-major order of its leading axes, reachable in blocks.

    Where the leading axes do not merge into one stride (a class axis in the middle, an expanded batch) the rows fall
    into pieces of equal length, and a block never crosses from one piece into the next.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.count = tensor.shape[:-1].numel()
        pieces = [tensor.unsqueeze(0) if tensor.dim() == 1 else tensor]
        while pieces and pieces[0].numel() and not _merges(pieces[0]):
            pieces = [part for piece in pieces for part in piece.unbind(0)]
        self._pieces = [piece.view(-1, piece.shape[-1]) for piece in pieces] if self.count else []

    def blocks(self, most: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, (R, V) view) with R at most `most`, over all rows."""
        start = 0
        for piece in self._pieces:
            for block in piece.split(most):
                yield start, block
                start += block.shape[0]

    def block(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop): a view if they lie in one piece, else a copy."""
        if not self._pieces:
            raise IndexError(f"rows {start} to {stop} of none")
        length = self._pieces[0].shape[0]
        parts = []
        while start < stop:
            piece, first = divmod(start, length)
            last = min(first + stop - start, length)
            parts.append(self._pieces[piece][first:last])
            start += last - first
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _merges(tensor: Tensor) -> bool:
    """Whether all leading axes merge into one without a copy."""
    expected = None
    for size, stride in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = stride * size
    return True


def row_sum(block: Tensor) -> Tensor:
    """Sum an (R, V) block over V so that a row's sum does not depend on R.

    PyTorch splits the sum of a single long row among threads, and the sums of several rows not; so a single row is
    summed as two.
    """
    return block.sum(-1) if block.shape[0] > 1 else block.expand(2, -1).sum(-1)[:1]
