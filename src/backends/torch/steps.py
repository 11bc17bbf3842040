"""The steps around the row kernel in PyTorch's own operations: order of rows, target logits, sum of losses, scaling."""

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts
from xent.backends.torch.rows import Rows
from xent.core.chunks import rows_per_block

__all__ = ["computed_first", "reduced", "scale_", "target_logits"]


def computed_first(facts: Facts) -> tuple[Tensor, Tensor, Facts]:
    """Return the order (N,) int64 of one row or more in which those to compute come first, their number, and the facts.

    The number is () int64; the facts are in that order. Else rows stay in the order of the call.
    """
    idle = facts.idle
    order = idle.argsort(stable=True)
    return order, (~idle).sum(), facts.select(order)


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
