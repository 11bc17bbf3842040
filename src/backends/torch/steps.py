"""The steps around the row kernel in PyTorch's own operations: sum of the rows' losses, target logits, scaling."""

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts
from xent.backends.torch.rows import Rows
from xent.core.chunks import rows_per_block

__all__ = ["reduced", "scale_", "target_logits"]


def reduced(values: Tensor, facts: Facts) -> Tensor:
    """Return per-row values (N,) as the spec's reduction has them: 0-d, or as they are for "none"."""
    if facts.spec.reduction == "none":
        return values
    total = values.sum()
    if facts.divisor is None:
        return total
    return torch.where(facts.divisor == 0, 0, total / facts.divisor)


def target_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Return the float32 logits (R,) of each row's target class, for hidden (R, D), weight (V, D) and bias (V,)."""
    found = (hidden.float() * weight[target].float()).sum(-1)
    return found if bias is None else found + bias[target]


def scale_(grad: Tensor, upstream: Tensor, deferred: Tensor) -> None:
    """Multiply a gradient by two 0-d factors of the accumulation dtype in place, rounding once."""
    factor = upstream * deferred
    if factor.device.type == "cpu":
        if float(factor) != 1:
            grad.mul_(factor)
    elif grad.dtype == factor.dtype or not grad.numel():
        grad.mul_(factor)
    else:
        # On an accelerator a 0-d factor is rounded to the gradient's precision first, and a 1-d one is not.
        for _, block in Rows(grad).blocks(rows_per_block(grad.shape[-1], factor.itemsize, factor.device.type, 1)):
            block.copy_(block * factor.reshape(1))
