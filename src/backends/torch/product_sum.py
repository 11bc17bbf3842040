"""`ProductSum`: a gradient that is accumulated over chunks, with bounded rounding error for 16-bit dtypes."""

import torch
from torch import Tensor

from xent.backends.torch.rows import cast
from xent.core.chunks import MOST_ROUNDED_SUMS

__all__ = ["ProductSum", "kept_dtype", "rounds_sums"]

_SLICE_BYTES, _SLICE_BYTES_CPU = 8 * 2**20, 2 * 2**20
_FLOAT16_ROWS = 1024
_WIDE_PRODUCTS = "dtype_out" in torch.ops.aten.addmm.overloads()


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a gradient is stored until the backward pass; float16 could overflow before 1/D."""
    return torch.float32 if dtype == torch.float16 else dtype


def rounds_sums(compute: torch.dtype, out: torch.dtype, device: torch.device) -> bool:
    """Whether a sum of few products is stored in the compute dtype, and so rounded by each addition."""
    return compute == out == torch.bfloat16 and device.type == "cuda"


class ProductSum:
    """The sum of left @ right over chunks of rows: the gradient of the classifier.

    In float32 and float64 the products are accumulated in place. For 16-bit dtypes the sum is float32. On CUDA, with
    PyTorch 2.8 or later, products are added to it in float32. Elsewhere each product is rounded to the compute dtype
    first, like the single product of the unfused computation. The errors of several roundings are independent and
    smaller, so that the total error is not larger, unless the products cancel.

    On CUDA a bfloat16 gradient of few chunks is accumulated in bfloat16, which takes half the memory; this is most of
    the memory of the call. The sum is then rounded once per chunk. If every chunk contributes to every class, the error
    is 1.3 to 1.6 times that of the unfused computation with 4 chunks and up to 3 times with 16. If most classes are no
    token's target, it is 1.2 times.
    """

    def __init__(
        self,
        shape: torch.Size,
        compute: torch.dtype,
        out: torch.dtype,
        device: torch.device,
        chunks: int | None,
    ) -> None:
        """Start a sum of this number of products; None if the sum must not be rounded, for any number of products."""
        self._shape, self._compute, self._out, self._device = shape, compute, kept_dtype(out), device
        self._sum: Tensor | None = None
        on_cuda = compute in (torch.bfloat16, torch.float16) and device.type == "cuda"
        self._fused = on_cuda and _WIDE_PRODUCTS
        rounds = chunks is not None and chunks <= MOST_ROUNDED_SUMS and rounds_sums(compute, out, device)
        self._wide = compute if compute.itemsize >= 4 or rounds else torch.float32

    def add(self, left: Tensor, right: Tensor, last: bool) -> None:
        """Add a chunk's (M, R) @ (R, D); `last` says that none follows."""
        alone = last and self._sum is None and self._compute == torch.bfloat16
        if self._wide == self._compute or (alone and self._device.type != "cpu"):
            self._add_in_place(left, right)
        elif alone:
            self._add_rounded(left, right, torch.bfloat16)
        elif self._fused:
            self._add_wide(left, right)
        elif self._compute == torch.float16:
            # Few rows per step, so that the rounded product stays in float16's range.
            for start in range(0, len(right), _FLOAT16_ROWS):
                rows = slice(start, start + _FLOAT16_ROWS)
                self._add_rounded(left[:, rows], right[rows])
        else:
            self._add_rounded(left, right)

    def result(self) -> Tensor:
        """Return the sum in the output dtype."""
        if self._sum is None:
            return torch.zeros(self._shape, dtype=self._out, device=self._device)
        return cast(self._sum, self._out)

    def _add_in_place(self, left: Tensor, right: Tensor) -> None:
        if self._sum is None:
            self._sum = left @ right
        else:
            torch.addmm(self._sum, left, right, out=self._sum)

    def _add_wide(self, left: Tensor, right: Tensor) -> None:
        if self._sum is None:
            self._sum = torch.mm(left, right, out_dtype=torch.float32)
        else:
            torch.addmm(self._sum, left, right, out_dtype=torch.float32, out=self._sum)

    def _add_rounded(self, left: Tensor, right: Tensor, kept: torch.dtype = torch.float32) -> None:
        """Add a product in slices, so that the rounded product takes little memory.

        On a CPU without bfloat16 instructions a product also needs memory for its float32 result. `kept` is the dtype
        of a new sum.
        """
        total, first = self._sum, self._sum is None
        if total is None:
            total = self._sum = torch.empty(self._shape, dtype=kept, device=self._device)
        most = _SLICE_BYTES_CPU if self._device.type == "cpu" else _SLICE_BYTES
        step = max(most // max(self._shape[1] * right.itemsize, 1), 1)
        for start in range(0, self._shape[0], step):
            product, place = left[start : start + step] @ right, total[start : start + step]
            if first:
                place.copy_(product)
            else:
                place.add_(product)
