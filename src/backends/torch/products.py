"""The matrix products of a linear loss: logits from hidden states, and the gradients that come back from them."""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Part, Schedule, wide
from xent.backends.torch.memory import cast, span
from xent.core.call import Product
from xent.core.chunks import MOST_ROUNDED_SUMS

__all__ = ["Classifier", "Gradients", "kept_dtype", "padded_columns", "rounds_sums"]

_WIDE_PRODUCTS = "dtype_out" in torch.ops.aten.mm.overloads() and "dtype_out" in torch.ops.aten.addmm.overloads()
_ALIGNED, _PADDED = 8, 64  # elements
_TILE_BYTES = 4 * 2**20
_SLICE_BYTES, _SLICE_BYTES_CPU = 8 * 2**20, 2 * 2**20
_FLOAT16_ROWS = 1024


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
        self.given, self.classes, self.needs = source, width, needs
        self.compute: torch.dtype = getattr(torch, source.dtype)
        self.hidden: Tensor = source.input
        """(N, D) in the caller's dtype."""
        if self.hidden.dim() != 2:
            self.hidden = self.hidden.reshape(self.hidden.shape[:-1].numel(), self.hidden.shape[-1])
        self.columns = padded_columns(width, self.hidden.device)
        self.padded = cast(self._extended(source.weight), self.compute)
        """(columns, D) in the compute dtype."""
        self.padded_bias = None if source.bias is None else cast(self._extended(source.bias), self.compute)

    @property
    def weight(self) -> Tensor:
        """(C, D) in the compute dtype."""
        return span(self.padded, 0, self.classes)

    @property
    def bias(self) -> Tensor | None:
        """(C,) in the compute dtype, or None."""
        return None if self.padded_bias is None else span(self.padded_bias, 0, self.classes)

    def _extended(self, values: Tensor) -> Tensor:
        """Return the first C rows with zeros appended. `F.pad` would write all of its result twice."""
        if self.columns == len(values):
            return values
        if self.columns == self.classes:
            return values[: self.classes]
        made = values.new_empty((self.columns, *values.shape[1:]))
        made[: self.classes].copy_(values[: self.classes])
        made[self.classes :].zero_()
        return made

    def write_logits(self, hidden: Tensor, out: Tensor, classes: slice | None = None) -> None:
        """Write the logits (R, C') of these classes, by default all columns, to `out`, for hidden (R, D).

        `hidden` has the compute dtype. `out` may be float32 if the compute dtype is narrower.
        """
        columns, bias = self.padded, self.padded_bias
        if classes is not None:
            columns, bias = columns[classes], None if bias is None else bias[classes]
        columns = columns.t()
        if out.dtype == hidden.dtype:
            if bias is None:
                torch.mm(hidden, columns, out=out)
            else:
                torch.addmm(bias, hidden, columns, out=out)
            return
        if hidden.is_cuda and _WIDE_PRODUCTS:
            torch.mm(hidden, columns, out_dtype=out.dtype, out=out)
        else:
            hidden = hidden.to(out.dtype)
            step = max(_TILE_BYTES // max(columns.shape[0] * out.itemsize, 1), 1)
            for start in range(0, columns.shape[1], step):
                tile = slice(start, start + step)
                torch.mm(hidden, columns[:, tile].to(out.dtype), out=out[:, tile])
        if bias is not None:
            out.add_(bias)

    def take(self, part: Part) -> Tensor:
        """Return the hidden states (R, D) of a part in the compute dtype."""
        rows = span(self.hidden, part.start, part.stop) if part.rows is None else self.hidden[part.rows]
        return cast(rows, self.compute)


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a gradient is stored until the backward pass; float16 could overflow before 1/D."""
    return torch.float32 if dtype == torch.float16 else dtype


def rounds_sums(compute: torch.dtype, out: torch.dtype, device: torch.device) -> bool:
    """Whether a sum of few products is stored in the compute dtype, and so rounded by each addition."""
    return compute == out == torch.bfloat16 and device.type == "cuda"


class Gradients:
    """The gradients of input, classifier and bias, as far as they are needed, accumulated over parts."""

    def __init__(self, source: Classifier, schedule: Schedule) -> None:
        self._source, self._schedule = source, schedule
        needs, hidden = source.needs, source.hidden
        self._input = hidden.new_empty(hidden.shape, dtype=kept_dtype(hidden.dtype)) if needs[0] else None
        self._weight = _ProductSum(source, schedule.chunks) if needs[1] else None
        self._bias = None
        if needs[2]:
            self._bias = torch.zeros(source.columns, dtype=wide(source.compute), device=hidden.device)

    def add_to_classifier(self, part: Part, trained: Tensor, grad: Tensor) -> None:
        """Add a part to the gradients of weight and bias.

        `trained` (R, D) are its hidden states, 0 in rows without a gradient; `grad` (R, columns) that of its logits.
        """
        if self._weight is not None:
            self._weight.add(grad.t(), trained, part.last)
        if self._bias is not None:
            self._bias += grad.sum(0, dtype=self._bias.dtype)

    def add_to_input(self, part: Part, grad: Tensor) -> None:
        """Write the gradient of a part's hidden states."""
        if self._input is None:
            return
        if part.rows is None and self._input.dtype == grad.dtype:
            torch.mm(grad, self._source.padded, out=self._input[part.start : part.stop])
        else:
            part.put(grad @ self._source.padded, self._input)

    def of_input(self) -> Tensor | None:
        """Return the gradient (N, D) of the input after the last part; None if it is not needed."""
        if self._input is not None and self._schedule.left_out is not None:
            self._input.index_fill_(0, self._schedule.left_out, 0)
        return self._input

    def of_classifier(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias, with zeros for the padding of a shard; None if not needed."""
        bias = self._source.given.bias
        of_bias = None if self._bias is None or bias is None else self._fitted(self._bias).to(kept_dtype(bias.dtype))
        return None if self._weight is None else self._fitted(self._weight.result()), of_bias

    def _fitted(self, made: Tensor) -> Tensor:
        """Return the first C rows, with zeros up to the rows of the given classifier."""
        classes, rows = self._source.classes, len(self._source.given.weight)
        if rows == classes:
            return span(made, 0, classes)
        return torch.cat((made[:classes], made.new_zeros((rows - classes, *made.shape[1:]))))


class _ProductSum:
    """The sum of left @ right over parts of rows: the gradient of the classifier.

    In float32 and float64 the products are accumulated in place. For 16-bit dtypes the sum is float32. On CUDA, with
    PyTorch 2.8 or later, products are added to it in float32. Elsewhere each product is rounded to the compute dtype
    first, like the single product of the unfused computation, if there are few parts; the errors of several roundings
    are independent and smaller. With many parts the factors are converted to float32 slice by slice.

    On CUDA a bfloat16 gradient of few parts is accumulated in bfloat16, which takes half the memory; this is most of
    the memory of the call. The sum is then rounded once per part. If every part contributes to every class, the error
    is 1.3 to 1.6 times that of the unfused computation with 4 parts and up to 3 times with 16. If most classes are no
    token's target, it is 1.2 times.
    """

    def __init__(self, source: Classifier, parts: int) -> None:
        weight = source.given.weight
        self._shape = (source.columns, weight.shape[1])
        self._compute, self._out, self._device = source.compute, kept_dtype(weight.dtype), weight.device
        self._sum: Tensor | None = None
        few = parts <= MOST_ROUNDED_SUMS
        on_cuda = self._compute in (torch.bfloat16, torch.float16) and self._device.type == "cuda"
        self._fused = on_cuda and _WIDE_PRODUCTS
        rounds = few and rounds_sums(self._compute, weight.dtype, self._device)
        self._wide = self._compute if self._compute.itemsize >= 4 or rounds else torch.float32
        self._widens = not few

    def add(self, left: Tensor, right: Tensor, last: bool) -> None:
        """Add a part's (M, R) @ (R, D); `last` says that none follows."""
        alone = last and self._sum is None and self._compute == torch.bfloat16
        if self._wide == self._compute or (alone and self._device.type != "cpu"):
            self._sum = left @ right if self._sum is None else torch.addmm(self._sum, left, right, out=self._sum)
        elif self._fused:
            if self._sum is None:
                self._sum = torch.mm(left, right, out_dtype=torch.float32)
            else:
                torch.addmm(self._sum, left, right, out_dtype=torch.float32, out=self._sum)
        else:
            # Few rows per step in float16, so that the rounded product stays in the range.
            step = _FLOAT16_ROWS if self._compute == torch.float16 else max(len(right), 1)
            for start in range(0, len(right), step):
                rows = slice(start, start + step)
                self._add_slices(left[:, rows], right[rows], torch.bfloat16 if alone else torch.float32)

    def result(self) -> Tensor:
        """Return the sum in the output dtype."""
        if self._sum is None:
            return torch.zeros(self._shape, dtype=self._out, device=self._device)
        return cast(self._sum, self._out)

    def _add_slices(self, left: Tensor, right: Tensor, kept: torch.dtype) -> None:
        """Add a product in slices of classes, so that intermediate results take little memory.

        On a CPU without bfloat16 instructions a product also needs memory for its float32 result. `kept` is the dtype
        of a new sum.
        """
        total, first = self._sum, self._sum is None
        if total is None:
            total = self._sum = torch.empty(self._shape, dtype=kept, device=self._device)
        factor: Any = right.float() if self._widens else right
        most = _SLICE_BYTES_CPU if self._device.type == "cpu" else _SLICE_BYTES
        step = max(most // max(self._shape[1] * factor.itemsize, 1), 1)
        for start in range(0, self._shape[0], step):
            slice_of_left, place = left[start : start + step], total[start : start + step]
            product = slice_of_left.to(factor.dtype) @ factor
            if first:
                place.copy_(product)
            else:
                place.add_(product)
