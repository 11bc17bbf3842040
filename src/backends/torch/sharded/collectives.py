"""Asynchronous collectives: started first, waited for later, so that computation in between hides them.

Waiting blocks the current stream, not the host. (With gloo, whose tensors are on the CPU, it blocks the host.) A group
of one rank sends nothing. A tensor without elements is not sent either.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Flight", "add_up", "gather", "scatter_sums"]

# PyTorch 2.13 renamed them and warns about the old names.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_reduce: Any = dist.all_reduce


class Flight(NamedTuple):
    """A collective that has been started."""

    result: Tensor
    work: Any
    source: Tensor
    """The tensor that is sent. Its memory must stay allocated until the collective is done."""

    def land(self) -> Tensor:
        """Wait for the collective and return its result."""
        if self.work is not None:
            self.work.wait()
        return self.result


def gather(values: Tensor, group: Any) -> Flight:
    """Gather the contiguous `values` of every rank, which have the same shape, into (ranks, *shape)."""
    ranks = group.size()
    if ranks == 1 or not values.numel():
        return Flight(values.expand(ranks, *values.shape), None, values)
    out = torch.empty((ranks, *values.shape), dtype=values.dtype, device=values.device)
    flat = out.view(ranks * values.shape[0], *values.shape[1:]) if values.dim() else out
    return Flight(out, _gather(flat, values, group=group, async_op=True), values)


def add_up(values: Tensor, group: Any) -> Flight:
    """Sum the contiguous `values` over all ranks, in place.

    If at most one rank has a nonzero value for an element, that sum has the same bits on every rank, whatever the
    order.
    """
    if group.size() == 1 or not values.numel():
        return Flight(values, None, values)
    return Flight(values, _reduce(values, group=group, async_op=True), values)


def scatter_sums(values: Tensor, group: Any) -> Flight:
    """Sum contiguous `values` (ranks, ...) over ranks, and return this rank's slice of the sum."""
    if group.size() == 1 or not values.numel():
        return Flight(values[0], None, values)
    out = torch.empty(values.shape[1:], dtype=values.dtype, device=values.device)
    flat = values.view(values.shape[0] * values.shape[1], *values.shape[2:])
    return Flight(out, _scatter(out, flat, group=group, async_op=True), values)
