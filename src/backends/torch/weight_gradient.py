"""The classifier's gradient, added up over chunks without losing what a low-precision sum would round off."""

import torch
from torch import Tensor

__all__ = ["WeightGradient"]

_SLICE_BYTES = 8 * 2**20


class WeightGradient:
    """Sums grad_logits^T @ hidden over chunks.

    In float32 and float64 the products add onto the sum in place. Below that each product is rounded to the compute
    dtype as the unfused computation's one product is, and the sum is float32: independent roundings of parts of the sum
    add up to no more than one rounding of the whole, however many chunks there are.
    """

    def __init__(self, shape: torch.Size, compute: torch.dtype, out: torch.dtype, device: torch.device) -> None:
        self._shape, self._compute, self._out, self._device = shape, compute, out, device
        self._sum: Tensor | None = None

    def add(self, grad_logits: Tensor, hidden: Tensor, last: bool) -> None:
        """Add a chunk's (R, V)^T @ (R, D); `last` says that none follows."""
        transposed = grad_logits.t()
        if self._sum is None and last:
            self._sum = transposed @ hidden
        elif self._compute in (torch.float32, torch.float64):
            if self._sum is None:
                self._sum = transposed @ hidden
            else:
                torch.addmm(self._sum, transposed, hidden, out=self._sum)
        else:
            first = self._sum is None
            if self._sum is None:
                self._sum = torch.empty(self._shape, dtype=torch.float32, device=self._device)
            step = max(_SLICE_BYTES // (self._shape[1] * hidden.itemsize), 1)
            for start in range(0, self._shape[0], step):
                product = transposed[start : start + step] @ hidden
                place = self._sum[start : start + step]
                if first:
                    place.copy_(product)
                else:
                    place.add_(product)

    def result(self) -> Tensor:
        """Return the sum in the output dtype."""
        if self._sum is None:
            return torch.zeros(self._shape, dtype=self._out, device=self._device)
        return self._sum.to(self._out)
