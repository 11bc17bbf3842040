"""Autograd functions on shards for eager calls without tracers, transforms or modes. See `xent.backends.torch.eager`.

With reduction "none" lse, nll and entropy are differentiable outputs too. The backward pass of a reduced loss scales
the gradients from the forward pass. They have been summed over ranks already, because the upstream gradient is the same
on all ranks.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import private
from xent.backends.torch.eager import is_simple, on_device, once, scaled
from xent.backends.torch.job import Upstream
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options, pack
from xent.backends.torch.rows import gradient_like
from xent.backends.torch.sharded.calls import (
    Where,
    linear_backward,
    linear_forward,
    logits_backward,
    logits_forward,
)
from xent.backends.torch.sharded.ops import keeps_gradient
from xent.backends.torch.statistics import constant, upstream_of

__all__ = ["cross_entropy", "linear_cross_entropy"]


def cross_entropy(
    logits: Tensor, where: Where, options: Options, needs_grad: bool, inplace: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the statistics of logits (..., V_r)."""
    if needs_grad:
        loss, _, *stats = _CrossEntropy.apply(logits, where, options, inplace)
        return loss, stats
    loss, _, stats = on_device(logits, logits_forward, logits, None, False, where, options)
    return loss, stats


def linear_cross_entropy(linear: Linear, where: Where, options: Options) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the statistics of hidden states and a classifier's shard."""
    if any(linear.needs):
        loss, _, *stats = _LinearCrossEntropy.apply(linear.input, linear.weight, linear.bias, linear, where, options)
        return loss, stats
    loss, _, _, _, stats = on_device(linear.input, linear_forward, linear, False, where, options)
    return loss, stats


class _CrossEntropy(torch.autograd.Function):
    """(logits, where, options, inplace) -> (loss, anchor, *stats)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, where: Where, options: Options, inplace: bool) -> Any:
        ctx.where, ctx.inplace, ctx.kernel, ctx.names = where, inplace, options.kernel, options.spec.stats
        ctx.is_made = keeps_gradient(logits, options)
        source = logits.detach()
        if ctx.is_made:
            grad = source if inplace else gradient_like(source)
            loss, _, stats = on_device(source, logits_forward, source, grad, False, where, options)
            if inplace:
                torch.autograd.graph.increment_version(logits)
            ctx.save_for_backward(anchor := loss.new_empty(0), logits if inplace else grad)
        else:
            loss, kept, stats = on_device(source, logits_forward, source, None, True, where, options)
            ctx.save_for_backward(anchor := loss.new_empty(0), logits, kept, *_tensors_of(ctx, options))
        ctx.reduction = options.spec.reduction
        ctx.mark_non_differentiable(*constant(ctx.reduction, ctx.names, stats))
        ctx.set_materialize_grads(False)
        return loss, anchor, *stats

    @staticmethod
    def backward(ctx: Any, loss: Tensor | None, _: Any, *stats: Any) -> Any:
        upstream = upstream_of(ctx.reduction, ctx.names, loss, stats)
        if all(one is None for one in upstream):
            return (None,) * 4
        if ctx.is_made:
            anchor, kept = ctx.saved_tensors
            assert upstream.loss is not None
            return once(anchor, partial(scaled, ctx.kernel, kept, upstream.loss, None)), None, None, None
        anchor, logits, kept, *tensors = ctx.saved_tensors
        options = _restored(ctx, tensors)

        def gradient() -> Tensor:
            if not all(map(is_simple, upstream)):
                arguments = (logits.detach(), kept, *upstream, *ctx.where, *pack(options))
                seen: Tensor = torch.ops.xent.sharded_cross_entropy_backward(*arguments)
                return seen
            reuse = ctx.inplace and not private.keeps_graph()
            made: Tensor = on_device(
                logits, logits_backward, upstream, logits.detach(), kept, ctx.where, options, reuse
            )
            if reuse:
                torch.autograd.graph.increment_version(logits)
            return made

        return once(anchor, gradient), None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """(input, weight, bias, linear, where, options) -> (loss, anchor, *stats)."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear, where: Where, options: Options
    ) -> Any:
        ctx.where, ctx.kernel, ctx.names = where, options.kernel, options.spec.stats
        ctx.is_made = options.spec.reduction != "none"
        ctx.needs, ctx.linear = linear.needs, (linear.shift, linear.workspace, linear.compute)
        ctx.dtypes = [source.dtype, weight.dtype, (weight if bias is None else bias).dtype]
        arguments = (linear, not ctx.is_made, where, options)
        loss, deferred, kept, made, stats = on_device(source, linear_forward, *arguments)
        anchor = loss.new_empty(0)
        if ctx.is_made:
            ctx.save_for_backward(anchor, deferred, *made)
        else:
            ctx.save_for_backward(anchor, source, weight, bias, kept, *_tensors_of(ctx, options))
        ctx.reduction = options.spec.reduction
        ctx.mark_non_differentiable(*constant(ctx.reduction, ctx.names, stats))
        ctx.set_materialize_grads(False)
        return loss, anchor, *stats

    @staticmethod
    def backward(ctx: Any, loss: Tensor | None, _: Any, *stats: Any) -> Any:
        upstream = upstream_of(ctx.reduction, ctx.names, loss, stats)
        if all(one is None for one in upstream):
            return (None,) * 6
        if ctx.is_made:
            anchor, deferred, *kept = ctx.saved_tensors
            assert upstream.loss is not None
            made: list[Tensor | None] = [
                scaled(ctx.kernel, grad, upstream.loss, deferred) if need else None
                for grad, need in zip(kept, ctx.needs, strict=True)
            ]
        else:
            anchor, *tensors = ctx.saved_tensors
            made = [*_made_again(ctx, tensors, upstream)]
        grads = [
            once(anchor, partial(grad.to, dtype)) if need and grad is not None else None
            for grad, dtype, need in zip(made, ctx.dtypes, ctx.needs, strict=True)
        ]
        return *grads, None, None, None


def _made_again(ctx: Any, tensors: list[Any], upstream: Upstream) -> list[Tensor]:
    """Recompute the gradients of a linear loss with reduction "none"."""
    source, weight, bias, kept, *rest = tensors
    options, (shift, workspace, compute) = _restored(ctx, rest), ctx.linear
    if not all(map(is_simple, upstream)):
        sources = (source.detach(), weight.detach(), None if bias is None else bias.detach())
        arguments = (kept, *upstream, *sources, ctx.needs, shift, workspace, compute, *ctx.where, *pack(options))
        seen: list[Tensor] = torch.ops.xent.sharded_linear_cross_entropy_backward(*arguments)
        return seen
    linear = Linear(source.detach(), weight.detach(), bias, shift, workspace, compute, ctx.needs)
    with torch.no_grad():
        made: list[Tensor] = on_device(source, linear_backward, upstream, linear, kept, ctx.where, options)
    return made


def _tensors_of(ctx: Any, options: Options) -> list[Tensor | None]:
    """Return the tensors among the options. Store the rest in the context."""
    arrays = options.tensors
    ctx.rest = options[len(arrays) :]
    ctx.numbers = [None if isinstance(value, Tensor) else value for value in arrays]
    return [value if isinstance(value, Tensor) else None for value in arrays]


def _restored(ctx: Any, tensors: list[Any]) -> Options:
    arrays = [value if number is None else number for value, number in zip(tensors, ctx.numbers, strict=True)]
    return Options(*arrays, *ctx.rest)
