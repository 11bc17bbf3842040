"""The dot product of a tensor and its gradient, in blocks that fit into caches."""

import torch
from torch import Tensor

from xent.backends.torch.rows import Rows
from xent.core.chunks import rows_per_block

__all__ = ["weighed_sum"]


def weighed_sum(grad: Tensor, values: Tensor) -> Tensor:
    """Return sum(grad * values) of two tensors (..., V), 0-d, float32 (float64 for float64).

    An element whose gradient is 0 adds 0, even if it is infinite or NaN.
    """
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=wide, device=grad.device)
    if not grad.numel():
        return total
    most = rows_per_block(grad.shape[-1], wide.itemsize, grad.device.type, torch.get_num_threads())
    other = Rows(values)
    for start, block in Rows(grad).blocks(most):
        product = block.to(wide) * other.block(start, start + len(block)).to(wide)
        total += product.masked_fill_(block == 0, 0).sum()
    return total
