"""Autograd around the operations of divergences. As for losses, "mean" and "sum" compute gradients with the loss."""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.autograd import differentiated, first_order, refused, scaled, signed
from xent.backends.torch.divergence.call import SCHEMA

__all__ = ["DivergenceFunction"]

_ARGUMENTS = SCHEMA.count(",") + 1
_TENSORS = 9  # number of tensor arguments, the first ones of `SCHEMA`


class DivergenceFunction(torch.autograd.Function):
    """(*arguments of `SCHEMA`) -> (loss, deferred, *gradients, entropy)."""

    @staticmethod
    @signed
    def forward(*args: Any) -> Any:
        loss, deferred, gradients, entropy = torch.ops.xent.divergence(*args)
        return loss, deferred, *gradients, entropy

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, deferred, *gradients, entropy = output
        ctx.constants, ctx.kernel = inputs[_TENSORS:], inputs[-1]
        ctx.needs = inputs[9]
        is_linear, reduction, compute = inputs[1] is not None, inputs[12], inputs[14]
        ctx.is_made = reduction != "none" and (is_linear or compute != torch.float16)
        ctx.dtypes = [None if source is None else source.dtype for source in inputs[:3]]
        if ctx.is_made:
            ctx.save_for_backward(deferred, *gradients)
            ctx.mark_non_differentiable(deferred, entropy)
        else:
            ctx.save_for_backward(*inputs[:_TENSORS])
            ctx.mark_non_differentiable(deferred, *gradients, entropy)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *more: Any) -> Any:
        rest = (None,) * (_ARGUMENTS - 3)
        if differentiated(*more[:4]):
            refusals = [
                None if grad is None or dtype is None else refused(grad, grad).to(dtype)
                for grad, dtype in zip(more[1:4], ctx.dtypes, strict=True)
            ]
            return *refusals, *rest
        if upstream is None:
            return None, None, None, *rest
        if ctx.is_made:
            deferred, *kept = ctx.saved_tensors
            gradients = [
                scaled(ctx, grad, upstream, deferred) if need else None
                for grad, need in zip(kept, ctx.needs, strict=True)
            ]
        else:
            tensors = ctx.saved_tensors
            gradients = first_order(torch.ops.xent.divergence_backward, upstream, *tensors, *ctx.constants)
        made = [
            grad.to(dtype) if need and grad is not None else None
            for grad, need, dtype in zip(gradients, ctx.needs, ctx.dtypes, strict=True)
        ]
        return *made, *rest
