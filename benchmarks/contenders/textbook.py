"""Tensor-parallel losses as in textbooks and Megatron: float32 logits of the shard, and all-reduces.

The three all-reduces of the cross entropy are of the largest logit of each row, the sum of exponentials, and the
target's logit. The gradient of the logits overwrites the probabilities. A divergence reduces the first two for student
and teacher, and its terms.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

__all__ = ["linear", "vocab_parallel_divergence", "vocab_parallel_loss"]


def linear(input: Tensor, weight: Tensor, group: Any) -> Tensor:
    """Return the logits (tokens, classes of this rank); the gradient of `input` is summed over ranks."""
    return F.linear(_Replicated.apply(input, group), weight)


def vocab_parallel_loss(logits: Tensor, target: Tensor, first: int, group: Any) -> Tensor:
    """Return float32 losses (tokens,) for logits of a shard whose first class is `first`."""
    return _Loss.apply(logits, target, first, group)


def vocab_parallel_divergence(logits: Tensor, teacher: Tensor, group: Any) -> Tensor:
    """Return KL(q || p) in float32 (tokens,) for the logits of a shard, p of the student and q of the teacher."""
    return _Divergence.apply(logits, teacher, group)


class _Replicated(torch.autograd.Function):
    """The identity for a replicated tensor; the backward pass sums its gradient over ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].contiguous()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _Loss(torch.autograd.Function):
    """(logits, target, first, group) -> losses."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int, group: Any) -> Tensor:
        values = logits.to(torch.float32, copy=True)
        largest = values.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        values.sub_(largest[:, None])
        here = (target >= first) & (target < first + values.shape[1])
        index = torch.where(here, target - first, 0)[:, None]
        at_target = torch.where(here, values.gather(1, index)[:, 0], 0.0)
        dist.all_reduce(at_target, group=group)
        sums = values.exp_().sum(-1)
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(values.div_(sums[:, None]), here, index)
        ctx.dtype = logits.dtype
        return sums.log() - at_target

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, here, index = ctx.saved_tensors
        probabilities.scatter_add_(1, index, -here[:, None].to(probabilities.dtype))
        return probabilities.mul_(gradients[0][:, None]).to(ctx.dtype), None, None, None


class _Divergence(torch.autograd.Function):
    """(logits, teacher's logits, group) -> divergences."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, group: Any) -> Tensor:
        log_p, log_q = (_log_softmax(values, group) for values in (logits, teacher))
        found = (log_q.exp() * (log_q - log_p)).sum(-1)
        dist.all_reduce(found, group=group)
        ctx.save_for_backward(log_p.exp_().sub_(log_q.exp_()))
        ctx.dtype = logits.dtype
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (differences,) = ctx.saved_tensors
        return differences.mul_(gradients[0][:, None]).to(ctx.dtype), None, None


def _log_softmax(logits: Tensor, group: Any) -> Tensor:
    values = logits.to(torch.float32, copy=True)
    largest = values.amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    sums = values.sub_(largest).exp().sum(-1, keepdim=True)
    dist.all_reduce(sums, group=group)
    return values.sub_(sums.log_())
