"""The gradient of a trained logit scale, such as CLIP's temperature.

The loss depends on raw logits z and their scale s only through the product s z, also with a softcap. With g = dL/dz::

    dL/ds = (1/s) sum_ic g_ic z_ic

For logits z = h W^T + b the sum is sum(dL/dh * h) + sum(dL/db * b), or the same with W instead of h. These gradients
are computed anyway, or for this sum only.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import wide
from xent.backends.torch.memory import Rows
from xent.core.call import Call, Given
from xent.core.chunks import rows_per_block

__all__ = ["scale_gradient", "with_scale"]


def with_scale(call: Call, asked: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return which gradients of the leaves are needed, also for that of the scale. `asked` begins with the leaves."""
    if isinstance(call.source, Given):
        return (True,)
    return asked[0] or not asked[1], asked[1], call.source.bias is not None


def scale_gradient(call: Call, gradients: list[Tensor | None]) -> Tensor:
    """Return the gradient of the scale, 0-d, in the dtype of sums."""
    source, scale = call.source, call.activation.logit_scale
    leaves: list[Any] = [source.logits] if isinstance(source, Given) else list(source[:3])
    if len(leaves) == 3 and gradients[0] is not None:
        leaves[1] = None
    total: Any = 0.0
    for gradient, values in zip(gradients, leaves, strict=True):
        if gradient is not None and values is not None:
            total = total + _product_sum(gradient, values)
    found: Tensor = total / scale
    return found


def _product_sum(grad: Tensor, values: Tensor) -> Tensor:
    """Return sum(grad * values) of two tensors (..., V), block by block.

    An element whose gradient is 0 adds 0, even if it is infinite or NaN.
    """
    dtype = wide(values.dtype)
    total = torch.zeros((), dtype=dtype, device=grad.device)
    if not grad.numel():
        return total
    most = rows_per_block(grad.shape[-1], dtype.itemsize, grad.device.type, torch.get_num_threads())
    other = Rows(values)
    for start, block in Rows(grad).blocks(most):
        product = block.to(dtype) * other.block(start, start + len(block)).to(dtype)
        total += product.masked_fill_(block == 0, 0).sum()
    return total
