"""Hidden states on the ranks of a group, replicated or split along the token axis, and the sum of their gradients.

Split tokens are cut along one axis as torch.chunk cuts it: all pieces have the same length, except the last ones. So
every rank knows all pieces from the total length.
"""

from math import prod
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.shards.collectives import Flight, add_up, gather, ranks_of, scatter_sums
from xent.core.call import Shards

__all__ = ["Tokens", "tokens_of"]


class Tokens(NamedTuple):
    """The distribution of hidden states (..., D) over the ranks of a group."""

    group: Any
    """The group that sums the gradient; None if the caller does."""
    axis: int | None
    """The axis that is split, >= 0; None if every rank has all tokens, or there are none."""
    shape: tuple[int, ...]
    """The shape of this rank's hidden states."""
    length: int = 0
    """The length of the split axis over all ranks."""

    def gathered(self, source: Tensor) -> Tensor:
        """Return the hidden states of all tokens."""
        if self.axis is None:
            return source
        pieces = gather(self._cut(source, 1), self.group).land()
        return pieces.flatten(0, 1)[: self.length].movedim(0, self.axis)

    def summed(self, grad: Tensor) -> Flight:
        """Start the sum over ranks of `grad`, the contiguous gradient of all tokens, which may be overwritten."""
        if self.axis is None:
            return add_up(grad, self.group)
        ranks, shape = ranks_of(self.group), list(self.shape)
        shape[self.axis] = self.length
        return scatter_sums(self._cut(grad.view(shape), ranks).unflatten(0, (ranks, -1)), self.group)

    def mine(self, summed: Tensor) -> Tensor:
        """Return the result of `summed` in the shape of this rank's hidden states."""
        if self.axis is None:
            return summed.view(self.shape)
        return summed[: self.shape[self.axis]].movedim(0, self.axis)

    def _cut(self, values: Tensor, pieces: int) -> Tensor:
        """Return contiguous `values` with the tokens on the first axis, and zeros up to the end of `pieces` pieces."""
        assert self.axis is not None
        values = values.movedim(self.axis, 0)
        missing = -(-self.length // ranks_of(self.group)) * pieces - values.shape[0]
        return F.pad(values, (0, 0) * (values.dim() - 1) + (0, missing)).contiguous()


def tokens_of(shards: Shards, shape: tuple[int, ...], count: int) -> Tokens:
    """Return the distribution of hidden states that have this shape here, in a call with `count` rows over all ranks.

    `shards.group` is a process group. Raise ValueError if these are not the tokens that torch.chunk gives to this rank.
    """
    if shards.axis is None or not count:
        return Tokens(shards.group if shards.reduces else None, None, shape)
    axis, ranks, rank = shards.axis % len(shape), ranks_of(shards.group), shards.group.rank()
    length = count // prod(shape[:axis] + shape[axis + 1 : -1])
    step = -(-length // ranks)
    start, stop = min(rank * step, length), min((rank + 1) * step, length)
    if shape[axis] != stop - start:
        raise ValueError(
            f"with sequence_parallel, {length} tokens on {ranks} ranks are cut as torch.chunk cuts them: this rank "
            f"should have {stop - start}, tokens [{start}, {stop}), and its input has {shape[axis]}"
        )
    return Tokens(shards.group, axis, shape, length)
