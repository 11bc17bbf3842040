"""Autograd around the operations of divergences. As for losses, "mean" and "sum" compute gradients with the loss."""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.autograd import differentiated, first_order, in_dtypes, made_gradients, refusals, signed
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
            return *refusals(ctx, more[1:4]), *rest
        if upstream is None:
            return None, None, None, *rest
        if ctx.is_made:
            return *made_gradients(ctx, upstream), *rest
        operation = torch.ops.xent.divergence_backward
        return *in_dtypes(ctx, first_order(operation, upstream, *ctx.saved_tensors, *ctx.constants)), *rest
