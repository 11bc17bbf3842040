"""The collectives, each started now and waited for later: what runs in between hides it.

Waiting makes the current stream wait, not the host (gloo, whose tensors are on the CPU, waits in the host). A group of
one rank sends nothing, nor does one without rows.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Flight", "add_up", "gather", "scatter_sums"]

# PyTorch 2.13 renames them and warns of the old names.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_reduce: Any = dist.all_reduce


class Flight(NamedTuple):
    """A collective on its way."""

    result: Tensor
    work: Any
    source: Tensor
    """What is sent, whose memory must stay until it has arrived."""

    def land(self) -> Tensor:
        """Return the result, once there."""
        if self.work is not None:
            self.work.wait()
        return self.result


def gather(values: Tensor, group: Any) -> Flight:
    """Return (ranks, *shape): the contiguous `values` of every rank, which have one shape."""
    ranks = group.size()
    if ranks == 1 or not values.numel():
        return Flight(values.expand(ranks, *values.shape), None, values)
    out = torch.empty((ranks, *values.shape), dtype=values.dtype, device=values.device)
    flat = out.view(ranks * values.shape[0], *values.shape[1:]) if values.dim() else out
    return Flight(out, _gather(flat, values, group=group, async_op=True), values)


def add_up(values: Tensor, group: Any) -> Flight:
    """Add the contiguous `values` of all ranks up, in place.

    The sum has the same bits on every rank where no more than one rank has anything but 0, whatever the order.
    """
    if group.size() == 1 or not values.numel():
        return Flight(values, None, values)
    return Flight(values, _reduce(values, group=group, async_op=True), values)


def scatter_sums(values: Tensor, group: Any) -> Flight:
    """Return this rank's part of the sum over ranks of contiguous `values` (ranks, ...)."""
    if group.size() == 1 or not values.numel():
        return Flight(values[0], None, values)
    out = torch.empty(values.shape[1:], dtype=values.dtype, device=values.device)
    flat = values.view(values.shape[0] * values.shape[1], *values.shape[2:])
    return Flight(out, _scatter(out, flat, group=group, async_op=True), values)
