"""The arithmetic of 8-bit factors: quantization, products, and the exact part of both gradients.

A row x (K,) of a matrix becomes codes x / s with one scale s = max |x| / the largest code, so that a product is ::

    left @ right.T ~ (left_codes @ right_codes.T) * left_scale[:, None] * right_scale

The scale of a row of zeros is 1, that of a row with an infinity or NaN is NaN, and so is all that is computed from the
row. Sizes are padded with zeros to multiples of 16, which products of GPUs need.

With hidden states h, classifier W, their scales s_r and s_c, codes H and C, and the gradient G of the logits, 0 at the
target and the likeliest classes of a row, whose entries are g ::

    logits = (H @ C.T) s_r s_c          dh_r = Q(G s_c) @ C + sum_e g_re W_e
    dW_e = Q((G s_r).T) @ H + sum_r g_re h_r

`Q` quantizes each row, for dh the row of a group of classes. The products of groups are rounded to bfloat16 and summed
in float32. Both products with W take the same codes, in two layouts. The logits of target and likeliest classes are
those of the 16-bit factors. The last terms are not quantized: they are summed in float32, rows in the order of the
call, and rounded once.

Rounding to 8 bits changes a logit by some hundredths. Where a trained model is unsure, that is most of the gradient's
error: with the target alone exact, it was up to 7 times that of bfloat16.

`Arithmetic` emulates it on every device, with float32 products. `xent.backends.triton.fp8` has the kernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.contract import Part

__all__ = ["CODES", "Arithmetic", "Entries", "Factors", "Quantized", "add_at", "padded"]

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


class Entries(NamedTuple):
    """The entries of the gradient of logits that are not quantized: those of the target and of likely classes."""

    ids: Tensor
    """(R, E) int64: their classes; those outside of the classifier have no gradient."""
    grads: Tensor
    """(R, E) float32"""


class Factors(NamedTuple):
    """The rows (R', C') of a product's left factor that are to be quantized."""

    codes: Tensor
    """(R', C'): memory."""
    scale: Tensor
    """(R',) float32: memory."""
    of_others: Tensor
    """(C',) float32: the scales of the right factor, by which the elements are multiplied first."""


def padded(size: int) -> int:
    """Return a size rounded up to a multiple of 16."""
    return -(-size // _MULTIPLE) * _MULTIPLE


class Arithmetic:
    """In PyTorch's own operations; products of the codes in float32."""

    def quantize(self, matrix: Tensor, transposes: bool) -> Quantized:
        """Quantize the rows of a matrix (R, K); `transposes`: also return its codes transposed."""
        codes, scale = _quantized(_padded(matrix))
        return Quantized(codes, scale, codes.t().contiguous() if transposes else None)

    def memory(self, rows: int, columns: int, device: torch.device) -> Quantized:
        """Return memory for the codes and scales of a matrix (R, K)."""
        codes = torch.empty(padded(rows), padded(columns), dtype=CODES, device=device)
        return Quantized(codes, torch.empty(padded(rows), dtype=torch.float32, device=device))

    def quantize_gradient(self, grad: Tensor, rows: Factors | None, columns: Factors | None) -> None:
        """Quantize the rows of grad (R, C), and its columns, both into given memory."""
        for matrix, factors in ((grad, rows), (grad.t(), columns)):
            if factors is not None:
                codes, scale = _quantized(_padded(matrix) * factors.of_others)
                factors.codes.copy_(codes)
                factors.scale.copy_(scale)

    def product(self, left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> Tensor:
        """Return the product (M, N) of codes (M, K) and (N, K), in bfloat16."""
        return (left.float() @ right.float().t()).mul_(left_scale[:, None]).mul_(right_scale).bfloat16()

    def likeliest(self, logits: Tensor, count: int) -> Tensor:
        """Return the classes (R, count) int64 of the largest logits of each row."""
        return logits.topk(count).indices

    def correct(self, logits: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> None:
        """Write the exact logits of classes (R, E), rounded, in the place of those of quantized factors."""
        exact = (hidden[:, None].float() * weight[ids].float()).sum(-1)
        if bias is not None:
            exact += bias[ids]
        logits.scatter_(1, ids, exact.to(logits.dtype))

    def put_hidden(self, product: Tensor, weight: Tensor, entries: Entries, part: Part, out: Tensor) -> None:
        """Write the gradient of the hidden states of a part to `out` (N, D): product (R, D) + sum_e g_e W_e."""
        gradient = product.float()
        for ids, grads in zip(entries.ids.unbind(1), entries.grads.unbind(1), strict=True):
            terms = grads[:, None] * weight[ids.clamp(0, len(weight) - 1)].float()
            gradient = gradient + terms.masked_fill_(grads[:, None] == 0, 0)
        part.put(gradient.to(out.dtype), out)

    def add_to_classes(self, total: Tensor, hidden: Tensor, entries: Entries) -> None:
        """Add g_e h_r to row e of the classifier's gradient (C, D), for all entries of all rows r."""
        grads = entries.grads.flatten()
        used = grads != 0
        classes, place = entries.ids.flatten()[used].clamp(0, len(total) - 1).unique(return_inverse=True)
        rows = torch.arange(len(grads), device=grads.device)[used] // entries.ids.shape[1]
        terms = grads[used][:, None] * hidden[rows].float()
        sums = add_at(terms.new_zeros(len(classes), hidden.shape[1]), place, terms)
        total[classes] = (total[classes] + sums).to(total.dtype)


def add_at(total: Tensor, places: Tensor, terms: Tensor) -> Tensor:
    """Add terms to elements or rows of `total`, in their order, so that the sums are the same bits each time."""
    if total.is_cuda:
        return total.index_put_((places,), terms, accumulate=True)
    return total.index_add_(0, places, terms)


def _padded(matrix: Tensor) -> Tensor:
    """Return a matrix (R, C) in float32, padded to (R', C')."""
    rows, columns = matrix.shape
    wide = matrix.new_zeros(padded(rows), padded(columns), dtype=torch.float32)
    wide[:rows, :columns] = matrix
    return wide


def _quantized(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of the rows of a float32 matrix."""
    largest = matrix.abs().amax(1)
    scale = (largest / torch.finfo(CODES).max).clamp_(min=_LEAST_SCALE)
    scale = scale.masked_fill_(largest == 0, 1).masked_fill_(largest == torch.inf, torch.nan)
    return (matrix * scale.reciprocal()[:, None]).to(CODES), scale
