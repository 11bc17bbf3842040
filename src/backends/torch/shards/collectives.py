"""Collectives that are started first and waited for later, so that computation in between hides them.

Waiting blocks the current stream, not the host. (With gloo, whose tensors are on the CPU, it blocks the host.) Without
a group, None, the results are those of one rank, and nothing is sent. A group of one rank sends as any other does. A
tensor has at least one axis and the same shape on all ranks. Without elements it is not sent.

Hidden states are replicated, or split along the token axis as torch.chunk cuts it: all pieces have the same length,
except the last ones. So every rank knows all pieces from the total length.
"""

from math import prod
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from xent.core.call import Shards
from xent.core.spec import Group

__all__ = ["Pending", "Tokens", "add_up", "gather", "tokens_of"]

# PyTorch 2.13 renamed them and warns about the old names.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_reduce: Any = dist.all_reduce


class Pending(NamedTuple):
    """A collective that has been started."""

    result: Tensor
    work: Any = None
    source: Tensor | None = None
    """The tensor that is sent. Its memory must stay allocated until the collective is done."""

    def wait(self) -> Tensor:
        """Wait for the collective and return its result."""
        if self.work is not None:
            self.work.wait()
        return self.result


def gather(array: Tensor, group: dist.ProcessGroup) -> Pending:
    """Gather the contiguous `array` of every rank into (ranks, *shape)."""
    out = array.new_empty((group.size(), *array.shape))
    if not array.numel():
        return Pending(out)
    return Pending(out, _gather(out.flatten(0, 1), array, group=group, async_op=True), array)


def add_up(array: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Sum the contiguous `array` over all ranks, in place.

    If at most one rank has a nonzero value for an element, the sum has the same bits on every rank, in any order.
    """
    if group is None or not array.numel():
        return Pending(array)
    return Pending(array, _reduce(array, group=group, async_op=True), array)


class Tokens(NamedTuple):
    """The distribution of hidden states (..., D) over the ranks of a group."""

    group: Group
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
        pieces = gather(self._cut(source, 1), self.group).wait()
        return pieces.flatten(0, 1)[: self.length].movedim(0, self.axis)

    def summed(self, grad: Tensor) -> Pending:
        """Start the sum over ranks of `grad`, the contiguous gradient of all tokens, which may be overwritten."""
        if self.axis is None:
            return add_up(grad, self.group)
        ranks, shape = self.group.size(), list(self.shape)
        shape[self.axis] = self.length
        pieces = self._cut(grad.view(shape), ranks)
        out = pieces.new_empty(len(pieces) // ranks, *pieces.shape[1:])
        return Pending(out, _scatter(out, pieces, group=self.group, async_op=True) if out.numel() else None, pieces)

    def own(self, summed: Tensor) -> Tensor:
        """Return the result of `summed` in the shape of this rank's hidden states."""
        if self.axis is None:
            return summed.view(self.shape)
        return summed[: self.shape[self.axis]].movedim(0, self.axis)

    def _cut(self, array: Tensor, pieces: int) -> Tensor:
        """Return a contiguous `array` with the tokens on the first axis, and zeros up to the end of `pieces` pieces."""
        assert self.axis is not None
        array = array.movedim(self.axis, 0)
        missing = -(-self.length // self.group.size()) * pieces - array.shape[0]
        return F.pad(array, (0, 0) * (array.dim() - 1) + (0, missing)).contiguous()


def tokens_of(shards: Shards, shape: tuple[int, ...], count: int) -> Tokens:
    """Return the distribution of hidden states that have this shape here, in a call with `count` rows over all ranks.

    `shards.group` is a process group. Raise ValueError if these are not the tokens that torch.chunk gives to this rank.
    """
    if shards.axis is None or not count:
        return Tokens(shards.group if shards.reduces else None, None, shape)
    axis, ranks, rank = shards.axis % len(shape), shards.group.size(), shards.group.rank()
    length = count // prod(shape[:axis] + shape[axis + 1 : -1])
    step = -(-length // ranks)
    start, stop = min(rank * step, length), min((rank + 1) * step, length)
    if shape[axis] != stop - start:
        raise ValueError(
            f"with sequence_parallel, {length} tokens on {ranks} ranks are cut as torch.chunk cuts them: this rank "
            f"should have {stop - start}, tokens [{start}, {stop}), and its input has {shape[axis]}"
        )
    return Tokens(shards.group, axis, shape, length)
