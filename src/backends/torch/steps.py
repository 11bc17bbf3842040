"""Steps beside the row pass, in PyTorch's own operations: target logits, reduction, products with gradients."""

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts, accumulation_dtype
from xent.backends.torch.rows import Rows
from xent.core.chunks import rows_per_block

__all__ = ["multiply", "reduced", "scale", "target_logits", "times", "weighed_sum"]


def reduced(values: Tensor, facts: Facts) -> Tensor:
    """Reduce per-row values (N,) by the reduction of the spec: to 0-d, or for "none" return them unchanged."""
    if facts.spec.reduction == "none":
        return values
    total, divisor = values.sum(), facts.divisor
    if divisor is None:
        return total
    if isinstance(divisor, Tensor):
        return torch.where(divisor == 0, 0, total / divisor)
    if total.is_cpu and divisor >= 1:  # so that the quotient is in the dtype's range
        return total.fill_(float(total) / divisor)  # as exact as PyTorch's division by a number, which takes longer
    return total / divisor if divisor else torch.zeros_like(total)


def target_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Return the float32 logits (R,) of each row's target class, for hidden (R, D), weight (V, D) and bias (V,)."""
    found = (hidden.float() * weight[target].float()).sum(-1)
    return found if bias is None else found + bias[target]


def scale(grads: list[Tensor], upstream: Tensor, deferred: Tensor | None, inplace: bool) -> list[Tensor]:
    """Return gradients times 0-d factors of the accumulation dtype, rounded once; with `inplace` overwrite them."""
    factor = upstream if deferred is None else upstream * deferred
    return [_scaled(grad, factor, inplace) for grad in grads]


def _scaled(grad: Tensor, factor: Tensor, inplace: bool) -> Tensor:
    if factor.is_cpu or grad.dtype == factor.dtype or not grad.numel():
        if not inplace:
            return grad * factor
        return grad if factor.is_cpu and float(factor) == 1 else grad.mul_(factor)
    # On an accelerator PyTorch rounds a 0-d factor to the gradient's dtype first, but not a 1-d factor.
    return multiply(grad, factor, grad if inplace else torch.empty_like(grad))


def multiply(grad: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """Write grad * factor to `out` and return it, block by block: `out` has the strides of `grad`, or no gaps."""
    step, places = rows_per_block(grad.shape[-1], factor.itemsize, factor.device.type, 1), Rows(out)
    for start, block in Rows(grad).blocks(step):
        places.block(start, start + len(block)).copy_(block * factor.reshape(1))
    return out


def weighed_sum(grad: Tensor, values: Tensor) -> Tensor:
    """Return sum(grad * values) of two tensors (..., V), 0-d, in the accumulation dtype, block by block.

    An element whose gradient is 0 adds 0, even if it is infinite or NaN.
    """
    wide = accumulation_dtype(grad.dtype)
    total = torch.zeros((), dtype=wide, device=grad.device)
    if not grad.numel():
        return total
    most = rows_per_block(grad.shape[-1], wide.itemsize, grad.device.type, torch.get_num_threads())
    other = Rows(values)
    for start, block in Rows(grad).blocks(most):
        product = block.to(wide) * other.block(start, start + len(block)).to(wide)
        total += product.masked_fill_(block == 0, 0).sum()
    return total


def times(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights * values, and 0 where the weight is 0, even if the value is infinite."""
    return (weights * values).masked_fill(weights == 0, 0)
