"""The matrix products of a linear loss: logits from hidden states, and the gradients that come back from them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Part, wide
from xent.backends.torch.memory import cast, span
from xent.core.call import Product
from xent.core.chunks import MOST_ROUNDED_SUMS
from xent.core.spec import QuantizedRows

__all__ = ["Classifier", "ProductSum", "float_product", "kept_dtype", "padded_columns", "rounds_sums"]

_ALIGNED, _PADDED = 8, 64  # elements
_TILE_BYTES = 2 * 2**20
_PIECE_BYTES = 32 * 2**20
"""Of the classes that are dequantized at a time: some thousand, so that products take no longer than with all."""


def padded_columns(classes: int, device: torch.device) -> int:
    """Return the columns of stored logits: on CUDA a multiple of 64 if rows are not multiples of 16 bytes.

    Matrix products with unaligned rows are several times slower.
    """
    if device.type != "cuda" or classes % _ALIGNED == 0:
        return classes
    return -(-classes // _PADDED) * _PADDED


class Classifier:
    """Hidden states (N, D) and a classifier of C classes, with zeros appended so that there are `columns` classes."""

    def __init__(self, source: Product, width: int, needs: tuple[bool, ...] = (False, False, False)) -> None:
        """`width`: the number C of classes, without the padding of a shard."""
        assert source.dtype is not None
        self.classes, self.needs = width, needs
        self.compute: torch.dtype = getattr(torch, source.dtype)
        self.hidden: Tensor = source.input
        """(N, D) in the caller's dtype."""
        if self.hidden.dim() != 2:
            self.hidden = self.hidden.reshape(self.hidden.shape[:-1].numel(), self.hidden.shape[-1])
        self.columns = padded_columns(width, self.hidden.device)
        self.quantized: Any = source.weight if isinstance(source.weight, QuantizedRows) else None
        weight: Any = source.weight
        self.padded: Any = None if self.quantized else cast(self._extended(weight), self.compute)
        """(columns, D) in the compute dtype; None of a quantized classifier."""
        self.padded_bias = None if source.bias is None else cast(self._extended(source.bias), self.compute)

    @property
    def weight(self) -> Any:
        """(C, D) in the compute dtype; None of a quantized classifier."""
        return None if self.quantized else span(self.padded, 0, self.classes)

    @property
    def bias(self) -> Tensor | None:
        """(C,) in the compute dtype, or None."""
        return None if self.padded_bias is None else span(self.padded_bias, 0, self.classes)

    def _extended(self, array: Tensor) -> Tensor:
        """Return the first C rows with zeros appended. `F.pad` would write all of its result twice."""
        if self.columns == array.shape[0]:
            return array
        if self.columns == self.classes:
            return array[: self.classes]
        padded = array.new_empty((self.columns, *array.shape[1:]))
        padded[: self.classes].copy_(array[: self.classes])
        padded[self.classes :].zero_()
        return padded

    def write_logits(self, hidden: Tensor, out: Tensor, classes: slice | None = None) -> None:
        """Write the logits (R, C') of these classes, by default all columns, to `out`, for hidden (R, D).

        `hidden` has the compute dtype. `out` may be float32 if the compute dtype is narrower.
        """
        if self.quantized is not None:
            for piece, rows in self._pieces():
                self._write(hidden, rows, None if self.padded_bias is None else self.padded_bias[piece], out[:, piece])
            return
        columns, bias = self.padded, self.padded_bias
        if classes is not None:
            columns, bias = columns[classes], None if bias is None else bias[classes]
        self._write(hidden, columns, bias, out)

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of classes of a quantized classifier, and their rows (C', D) in the compute dtype."""
        step = max(_PIECE_BYTES // max(self.compute.itemsize * self.quantized.shape[1], 1), 1)
        for start in range(0, self.classes, step):
            stop = min(start + step, self.classes)
            yield slice(start, stop), self.quantized.rows(start, stop, self.compute)

    def times(self, grad: Tensor, out: Tensor | None = None) -> Tensor:
        """Return grad (R, columns) @ weight, (R, D), in `out` if given; of float16 factors otherwise in float32."""
        if self.quantized is None:
            return float_product(grad, self.padded) if out is None else torch.mm(grad, self.padded, out=out)
        total = ProductSum(grad.new_empty(len(grad), self.quantized.shape[1]), wide(self.compute), 2)
        for piece, rows in self._pieces():
            total.add(grad[:, piece], rows)
        return cast(total.result(), kept_dtype(grad.dtype)) if out is None else out.copy_(total.result())

    def _write(self, hidden: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Write the logits (R, C') of rows (C', D) of the classifier."""
        columns = columns.t()
        if out.dtype == hidden.dtype:
            if bias is None:
                torch.mm(hidden, columns, out=out)
            else:
                torch.addmm(bias, hidden, columns, out=out)
            return
        if hidden.is_cuda:
            torch.mm(hidden, columns, out_dtype=out.dtype, out=out)
        else:
            hidden = hidden.to(out.dtype)
            for tile in _tiles(columns.t()):
                torch.mm(hidden, columns[:, tile].to(out.dtype), out=out[:, tile])
        if bias is not None:
            out.add_(bias)

    def select(self, part: Part) -> Tensor:
        """Return the hidden states (R, D) of a part in the compute dtype."""
        return cast(self.hidden[part.indices], self.compute)


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a gradient is stored until the backward pass; float16 could overflow before 1/D."""
    return torch.float32 if dtype == torch.float16 else dtype


def float_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, in float32 if they are float16: a gradient could overflow before it is divided by D."""
    if left.dtype != torch.float16:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    product = left.new_zeros((len(left), right.shape[1]), dtype=torch.float32)
    for tile in _tiles(right):
        product.addmm_(left[:, tile].float(), right[tile].float())
    return product


def rounds_sums(compute: torch.dtype, out: torch.dtype, device: torch.device) -> bool:
    """Whether a sum of few products is stored in the compute dtype, and so rounded by each addition."""
    return compute == out == torch.bfloat16 and device.type == "cuda"


class ProductSum:
    """The sum of left @ right over parts: the gradient of the classifier (columns, D), or a product in pieces.

    In float32 and float64 the products are accumulated in place. For 16-bit dtypes the sum is float32. On CUDA products
    are added to it in float32. Elsewhere the factors are converted to float32 tile by tile. A single bfloat16 product
    is rounded once, into memory of its own dtype.

    On CUDA a bfloat16 gradient of few parts is accumulated in bfloat16, which takes half the memory; this is most of
    the memory of the call. The sum is then rounded once per part. If every part contributes to every class, the error
    is 1.3 to 1.6 times that of the unfused computation with 4 parts and up to 3 times with 16. If most classes are no
    token's target, it is 1.2 times.
    """

    def __init__(self, like: Tensor, out: torch.dtype, parts: int) -> None:
        """`like` has the sum's shape and the dtype of the products, `out` is the dtype of the gradient."""
        self._like, self._out, compute = like, kept_dtype(out), like.dtype
        self._sum: Tensor | None = None
        rounds = parts <= MOST_ROUNDED_SUMS and rounds_sums(compute, out, like.device)
        alone = parts == 1 and compute == torch.bfloat16
        self._dtype = compute if compute.itemsize >= 4 or rounds or alone else torch.float32

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add a part's (columns, R) @ (R, D)."""
        total, dtype = self._sum, self._dtype
        if left.dtype == dtype and (dtype.itemsize >= 4 or left.device.type != "cpu"):
            self._sum = left @ right if total is None else torch.addmm(total, left, right, out=total)
        elif left.is_cuda:
            if total is None:
                self._sum = torch.mm(left, right, out_dtype=dtype)
            else:
                torch.addmm(total, left, right, out_dtype=dtype, out=total)
        else:
            if total is None:
                self._sum = total = torch.zeros_like(self._like, dtype=dtype)
            factor = right.float()
            for tile in _tiles(total):
                if dtype == torch.float32:
                    total[tile].addmm_(left[tile].float(), factor)
                else:  # the only part
                    total[tile] = left[tile].float() @ factor

    def result(self) -> Tensor:
        """Return the sum in the output dtype."""
        total = torch.zeros_like(self._like) if self._sum is None else self._sum
        return cast(total, self._out)


def _tiles(matrix: Tensor) -> Iterator[slice]:
    """Yield ranges of rows whose conversion to float32 takes little memory."""
    step = max(_TILE_BYTES // max(4 * matrix.shape[1], 1), 1)
    for start in range(0, len(matrix), step):
        yield slice(start, start + step)
