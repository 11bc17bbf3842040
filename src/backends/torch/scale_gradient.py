"""The gradient of a trained logit scale, such as CLIP's temperature.

The loss depends on raw logits z and their scale s only through the product s z, also with a softcap. With g = dL/dz::

    dL/ds = (1/s) sum_ic g_ic z_ic

For logits z = h W^T + b the sum is sum(dL/dh * h) + sum(dL/db * b), or the same with W instead of h. The backward pass
computes these gradients anyway. `of_logits` and `of_linear` pass the tensors through a Function whose backward pass
receives them and returns the gradient of s.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.autograd import asks_for_gradient, first_order
from xent.backends.torch.facts import accumulation_dtype

__all__ = ["of_linear", "of_logits"]

_LEAST = {torch.float64: 2.0**-300, torch.float32: 2.0**-60}
"""Scales closer to 0 are replaced by this. The rounded x is 0 in both cases, but g, which has the factor s, is not."""


class _Follow(torch.autograd.Function):
    """(values, scale) -> values. The backward pass also computes the gradient of the scale."""

    @staticmethod
    def forward(values: Tensor, scale: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        values, scale = ctx.saved_tensors
        total = first_order(torch.ops.xent.weighed_sum, grad, values)
        return grad if ctx.needs_input_grad[0] else None, total.to(scale.device, scale.dtype) / scale


def of_logits(logits: Tensor, scale: Tensor | None, inplace: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return logits to be passed to the loss, so that a trained scale gets its gradient, and the scale for the loss."""
    if not asks_for_gradient(scale)[0]:
        return logits, scale
    if inplace:
        raise ValueError(
            "inplace=True overwrites the logits, which the gradient of logit_scale is made of: pass inplace=False, or "
            "logit_scale.detach()"
        )
    used = _used(scale, logits.dtype)
    return _Follow.apply(logits, used), used.detach()


def of_linear(
    source: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return input, classifier, bias and scale to be passed to the loss, so that the scale gets its gradient."""
    if not asks_for_gradient(scale)[0]:
        return source, weight, bias, scale
    used = _used(scale, source.dtype)
    if weight.requires_grad and not source.requires_grad:  # its gradient is computed anyway
        weight = _Follow.apply(weight, used)
    else:
        source = _Follow.apply(source, used)
    return source, weight, None if bias is None else _Follow.apply(bias, used), used.detach()


def _used(scale: Any, dtype: torch.dtype) -> Tensor:
    """Return the scale in the accumulation dtype, at least `_LEAST` away from 0 (not for float16 gradients)."""
    wide: Tensor = scale.to(accumulation_dtype(dtype))
    if dtype == torch.float16:
        return wide
    least = wide.detach().new_full((), _LEAST[wide.dtype]).copysign(wide.detach())
    return wide + torch.where(wide.detach().abs() < least.abs(), least - wide.detach(), 0)
