"""Hidden states on the ranks of a group, replicated or split along the token axis, and the sum of their gradients.

Split tokens are cut along one axis as torch.chunk cuts it: all pieces have the same length, except the last ones. So
every rank knows all pieces from the total length.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.sharded.collectives import Flight, add_up, gather, scatter_sums

__all__ = ["Tokens", "piece"]


def piece(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the range [start, stop) of a rank's tokens out of `length`."""
    step = -(-length // ranks)
    return min(rank * step, length), min((rank + 1) * step, length)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The distribution of a call's input (..., D) over the ranks of a group."""

    group: Any
    axis: int | None
    """The axis that is split; None if every rank has all tokens."""
    length: int
    """Length of the whole axis, over all ranks."""
    reduces: bool
    """Whether the call sums the gradient over ranks. If not, the caller does."""

    @property
    def _step(self) -> int:
        ranks: int = self.group.size()
        return -(-self.length // ranks)

    def gathered(self, source: Tensor) -> Tensor:
        """Return the hidden states of all tokens."""
        if self.axis is None:
            return source
        pieces = gather(self._padded(source).movedim(self.axis, 0).contiguous(), self.group).land()
        return pieces.flatten(0, 1)[: self.length].movedim(0, self.axis)

    def summed(self, grad: Tensor) -> Flight:
        """Start the sum of `grad`, the gradient of all tokens, over ranks.

        The result is this rank's part if tokens are split.
        """
        if not self.reduces:
            return Flight(grad, None, grad)
        if self.axis is None:
            return add_up(grad, self.group)
        ranks = self.group.size()
        pieces = F.pad(grad.movedim(self.axis, 0).flatten(1), (0, 0, 0, ranks * self._step - self.length))
        return scatter_sums(pieces.contiguous().view(ranks, self._step, -1), self.group)

    def mine(self, summed: Tensor, shape: torch.Size) -> Tensor:
        """Reshape the result of `summed` to the shape of this rank's input."""
        if self.axis is None or not self.reduces:
            return summed
        here, rest = shape[self.axis], [size for place, size in enumerate(shape) if place != self.axis]
        return summed.view(-1, *rest)[:here].movedim(0, self.axis)

    def _padded(self, source: Tensor) -> Tensor:
        assert self.axis is not None
        missing = self._step - source.shape[self.axis]
        return source if not missing else F.pad(source.movedim(self.axis, -1), (0, missing)).movedim(-1, self.axis)
