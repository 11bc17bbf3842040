"""The arithmetic of 8-bit factors: quantization, products, and the target's exact part of both gradients.

A row x (K,) of a matrix becomes codes x / s with one scale s = max |x| / the largest code, so that a product is ::

    left @ right.T ~ (left_codes @ right_codes.T) * left_scale[:, None] * right_scale

The scale of a row of zeros is 1, that of a row with an infinity or NaN is NaN, and so is all that is computed from the
row. Sizes are padded with zeros to multiples of 16, which products of GPUs need.

With hidden states h, classifier W, their scales s_r and s_c, codes H and C, and the gradient G of the logits, 0 at the
targets y, whose entries are g ::

    logits = (H @ C.T) s_r s_c          dh = Q(G s_c) @ C + g W_y
    dW = Q((G s_r).T) @ H + sum_{r: y_r = c} g_r h_r

`Q` quantizes each row, for dh the row of a group of classes, whose products are summed in float32. Both products with W
take the same codes, in two layouts. The last terms are not quantized: they are summed in float32, rows in the order of
the call, and rounded once with the product.

`Arithmetic` emulates it on every device, with float32 products. `xent.backends.triton.fp8` has the kernels.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.contract import Part

__all__ = ["CODES", "Arithmetic", "Factors", "Quantized", "padded"]

CODES = torch.float8_e4m3fn
_MULTIPLE = 16
_LEAST_SCALE = 2.0**-100


class Quantized(NamedTuple):
    """A matrix (R, K) in 8 bits, R and K padded to multiples of 16."""

    codes: Tensor
    """(R, K)"""
    scale: Tensor
    """(R,) float32"""
    transposed: Tensor | None = None
    """(K, R): the same codes."""


class Factors(NamedTuple):
    """The rows (R', C') of a product's left factor that are to be quantized."""

    codes: Tensor
    """(R', C'): memory, whose columns are adjacent."""
    scale: Tensor
    """(R',) float32: memory."""
    largest: Tensor
    """(R',) float32: the largest absolute values."""
    of_others: Tensor
    """(C',) float32: the scales of the right factor, by which the elements are multiplied first."""


def padded(size: int) -> int:
    """Return a size rounded up to a multiple of 16."""
    return -(-size // _MULTIPLE) * _MULTIPLE


def scales(largest: Tensor) -> Tensor:
    """Return the scales of rows from their largest absolute values, float32."""
    scale = (largest / torch.finfo(CODES).max).clamp_(min=_LEAST_SCALE)
    return scale.masked_fill_(largest == 0, 1).masked_fill_(largest == torch.inf, torch.nan)


class Arithmetic:
    """In PyTorch's own operations; products of the codes in float32."""

    def quantize(self, matrix: Tensor, transposes: bool) -> Quantized:
        """Quantize the rows of a matrix (R, K); `transposes`: also return its codes transposed."""
        wide = _padded(matrix)
        scale = scales(wide.abs().amax(1))
        codes = (wide * scale.reciprocal()[:, None]).to(CODES)
        return Quantized(codes, scale, codes.t().contiguous() if transposes else None)

    def largest(
        self, grad: Tensor, class_scale: Tensor | None, row_scale: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the largest absolute values of the rows (R',) of grad (R, C), times the scales of classes (C',).

        And those of its columns (C',), times the scales of rows (R',). None for that whose scales are None.
        """
        magnitudes = _padded(grad).abs()
        return (
            None if class_scale is None else (magnitudes * class_scale).amax(1),
            None if row_scale is None else (magnitudes * row_scale[:, None]).amax(0),
        )

    def memory(self, rows: int, columns: int, device: torch.device) -> Quantized:
        """Return memory for the codes and scales of a matrix (R, K)."""
        codes = torch.empty(padded(rows), padded(columns), dtype=CODES, device=device)
        return Quantized(codes, torch.empty(padded(rows), dtype=torch.float32, device=device))

    def quantize_gradient(self, grad: Tensor, rows: Factors | None, columns: Factors | None) -> None:
        """Quantize the rows of grad (R, C), and its columns, both into given memory."""
        for matrix, factors in ((grad, rows), (grad.t(), columns)):
            if factors is not None:
                factors.scale.copy_(scales(factors.largest))
                codes = _padded(matrix) * factors.of_others * factors.scale.reciprocal()[:, None]
                factors.codes.copy_(codes.to(CODES))

    def product(self, left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> Tensor:
        """Return the product (M, N) of codes (M, K) and (N, K), in bfloat16."""
        return (left.float() @ right.float().t()).mul_(left_scale[:, None]).mul_(right_scale).bfloat16()

    def put_hidden(
        self, product: Tensor, weight: Tensor, ids: Tensor, of_targets: Tensor | None, part: Part, out: Tensor
    ) -> None:
        """Write the gradient of the hidden states of a part to `out` (N, D): product (R, D) + g W_y.

        `ids` (N,) are the targets, `of_targets` (R,) the gradients g of their logits.
        """
        gradient = product.float()
        if of_targets is not None:
            place = ids[part.indices].clamp(0, len(weight) - 1)
            gradient = gradient + (of_targets[:, None] * weight[place].float()).masked_fill_(
                of_targets[:, None] == 0, 0
            )
        part.put(gradient.to(out.dtype), out)

    def add_to_classes(self, total: Tensor, hidden: Tensor, ids: Tensor, of_targets: Tensor) -> None:
        """Add g_r h_r to row y_r of the classifier's gradient (C, D), for all rows r."""
        used = of_targets != 0
        classes, place = ids[used].clamp(0, len(total) - 1).unique(return_inverse=True)
        terms = of_targets[used][:, None] * hidden[used].float()
        sums = terms.new_zeros(len(classes), hidden.shape[1]).index_put_((place,), terms, accumulate=True)
        total[classes] = (total[classes] + sums).to(total.dtype)


def _padded(matrix: Tensor) -> Tensor:
    """Return a matrix (R, C) in float32, padded to (R', C')."""
    rows, columns = matrix.shape
    return F.pad(matrix.float(), (0, padded(columns) - columns, 0, padded(rows) - rows))
