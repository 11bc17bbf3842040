"""Autograd functions around the custom operations on shards, for compilers and modes.

See `xent.backends.torch.autograd`.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.autograd import differentiated, first_order, refused, scaled
from xent.backends.torch.logits import makes_gradient_first
from xent.backends.torch.options import TENSORS, reduction_of, stats_of
from xent.backends.torch.sharded import ops as _ops  # noqa: F401  registers the operations
from xent.backends.torch.sharded.calls import Where
from xent.backends.torch.statistics import constant, upstream_of

__all__ = ["ShardedCrossEntropy", "ShardedLinearCrossEntropy"]

_OF_WHERE = len(Where._fields)


class ShardedCrossEntropy(torch.autograd.Function):
    """(logits, needs_grad, *where, *options) -> (loss, kept, *stats)."""

    @staticmethod
    def forward(logits: Tensor, needs_grad: bool, *args: Any) -> Any:
        loss, kept, stats = torch.ops.xent.sharded_cross_entropy(logits, needs_grad, *args)
        return loss, kept, *stats

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, _, *args = inputs
        _, kept, *stats = output
        options = _keep(ctx, args)
        ctx.is_made = makes_gradient_first(ctx.reduction, logits.dtype)
        silent = constant(ctx.reduction, ctx.names, stats)
        if ctx.is_made:
            ctx.save_for_backward(kept)
        else:
            ctx.save_for_backward(logits, kept, *options[:TENSORS])
            silent = [kept, *silent]
        ctx.mark_non_differentiable(*silent)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, loss: Tensor | None, kept_upstream: Any, *stats: Any) -> Any:
        rest = (None,) * ctx.rest
        if differentiated(kept_upstream):
            return refused(kept_upstream, kept_upstream), *rest
        upstream = upstream_of(ctx.reduction, ctx.names, loss, stats)
        if all(one is None for one in upstream):
            return None, *rest
        if ctx.is_made:
            assert upstream.loss is not None
            return scaled(ctx, ctx.saved_tensors[0], upstream.loss, None), *rest
        logits, kept, *tensors = ctx.saved_tensors
        operation = torch.ops.xent.sharded_cross_entropy_backward
        return first_order(operation, logits, kept, *upstream, *ctx.where, *tensors, *ctx.constants), *rest


class ShardedLinearCrossEntropy(torch.autograd.Function):
    """(input, weight, bias, needs, shift, workspace, dtype, *where, *options) -> the operation's results, flattened."""

    @staticmethod
    def forward(*args: Any) -> Any:
        loss, deferred, kept, gradients, stats = torch.ops.xent.sharded_linear_cross_entropy(*args)
        return loss, deferred, kept, *gradients, *stats

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        linear = inputs[:7]
        _, deferred, kept, *rest = output
        gradients, stats = rest[:3], rest[3:]
        options = _keep(ctx, inputs[7:])
        ctx.rest += 4
        ctx.needs, ctx.linear = linear[3], linear[3:]
        ctx.dtypes = [linear[0].dtype, linear[1].dtype, (linear[1] if linear[2] is None else linear[2]).dtype]
        ctx.is_made = ctx.reduction != "none"
        silent = [deferred, kept, *constant(ctx.reduction, ctx.names, stats)]
        if ctx.is_made:
            ctx.save_for_backward(deferred, *gradients)
        else:
            ctx.save_for_backward(*linear[:3], kept, *options[:TENSORS])
            silent += gradients
        ctx.mark_non_differentiable(*silent)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, loss: Tensor | None, _: Any, __: Any, *more: Any) -> Any:
        rest = (None,) * (ctx.rest - 1)
        if differentiated(*more[:3]):
            return *(
                None if grad is None else refused(grad, grad).to(dtype)
                for grad, dtype in zip(more[:3], ctx.dtypes, strict=True)
            ), *rest
        upstream = upstream_of(ctx.reduction, ctx.names, loss, more[3:])
        if all(one is None for one in upstream):
            return None, None, None, *rest
        if ctx.is_made:
            assert upstream.loss is not None
            deferred, *kept = ctx.saved_tensors
            gradients = [
                scaled(ctx, grad, upstream.loss, deferred) if need else None
                for grad, need in zip(kept, ctx.needs, strict=True)
            ]
        else:
            source, weight, bias, saved, *tensors = ctx.saved_tensors
            operation = torch.ops.xent.sharded_linear_cross_entropy_backward
            arguments = (saved, *upstream, source, weight, bias, *ctx.linear, *ctx.where, *tensors, *ctx.constants)
            gradients = first_order(operation, *arguments)
        made = [
            grad.to(dtype) if need and grad is not None else None
            for grad, need, dtype in zip(gradients, ctx.needs, ctx.dtypes, strict=True)
        ]
        return *made, *rest


def _keep(ctx: Any, args: Any) -> Any:
    """Store the description of the shard and the options' constants in the context. Return the options."""
    ctx.where, options = args[:_OF_WHERE], args[_OF_WHERE:]
    ctx.reduction, ctx.kernel, ctx.names = reduction_of(options), options[-1], stats_of(options)
    ctx.constants = options[TENSORS:]
    ctx.rest = 1 + len(args)
    return options
