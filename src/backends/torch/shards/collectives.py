"""Collectives that are started first and waited for later, so that computation in between hides them.

Waiting blocks the current stream, not the host. (With gloo, whose tensors are on the CPU, it blocks the host.) Without
a group, None, the results are those of one rank, and nothing is sent. A group of one rank sends as any other does. A
tensor has at least one axis and the same shape on all ranks. Without elements it is not sent.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Flight", "add_up", "gather", "ranks_of", "scatter_sums"]

# PyTorch 2.13 renamed them and warns about the old names.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_reduce: Any = dist.all_reduce


class Flight(NamedTuple):
    """A collective that has been started."""

    result: Tensor
    work: Any = None
    source: Tensor | None = None
    """The tensor that is sent. Its memory must stay allocated until the collective is done."""

    def land(self) -> Tensor:
        """Wait for the collective and return its result."""
        if self.work is not None:
            self.work.wait()
        return self.result


def ranks_of(group: Any) -> int:
    """Return the number of ranks of a group; 1 without a group."""
    return 1 if group is None else int(group.size())


def gather(values: Tensor, group: Any) -> Flight:
    """Gather the contiguous `values` of every rank into (ranks, *shape)."""
    if group is None:
        return Flight(values[None])
    out = values.new_empty((group.size(), *values.shape))
    if not values.numel():
        return Flight(out)
    return Flight(out, _gather(out.flatten(0, 1), values, group=group, async_op=True), values)


def add_up(values: Tensor, group: Any) -> Flight:
    """Sum the contiguous `values` over all ranks, in place.

    If at most one rank has a nonzero value for an element, the sum has the same bits on every rank, in any order.
    """
    if group is None or not values.numel():
        return Flight(values)
    return Flight(values, _reduce(values, group=group, async_op=True), values)


def scatter_sums(values: Tensor, group: Any) -> Flight:
    """Sum contiguous `values` (ranks, ...) over ranks, and return this rank's slice of the sum."""
    if group is None or not values.numel():
        return Flight(values[0])
    out = torch.empty_like(values[0])
    return Flight(out, _scatter(out, values.flatten(0, 1), group=group, async_op=True), values)
