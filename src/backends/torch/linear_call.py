"""The arguments of a linear loss in the driver: hidden states, weight, bias, and which gradients are needed."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.product_sum import rounds_sums
from xent.core.chunks import rows_per_chunk

__all__ = ["Linear", "compute_dtype"]

WIDE_PRODUCTS = "dtype_out" in torch.ops.aten.mm.overloads()
_ALIGNED, _PADDED = 8, 64  # elements
_TILE_BYTES = 4 * 2**20


@dataclass(eq=False)  # not frozen: see `xent.backends.torch.facts.Facts`
class Linear:
    """Hidden states and classifier of a linear loss."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    shift: int
    workspace: int | None
    compute: torch.dtype
    needs: tuple[bool, bool, bool]
    """Whether gradients of input, weight and bias are needed."""

    @property
    def fields(self) -> tuple[Any, ...]:
        """All fields."""
        return self.input, self.weight, self.bias, self.shift, self.workspace, self.compute, self.needs

    @property
    def hidden(self) -> Tensor:
        """Hidden states (N, D), in the caller's dtype."""
        return self.input if self.input.dim() == 2 else self._flat

    @cached_property
    def _flat(self) -> Tensor:
        return self.input.reshape(self.input.shape[:-1].numel(), self.input.shape[-1])

    @property
    def classifier(self) -> Tensor:
        """Weight (V, D), in the compute dtype."""
        return self.weight if self.weight.dtype == self.compute else self._converted

    @cached_property
    def _converted(self) -> Tensor:
        return self.weight.to(self.compute)

    @cached_property
    def classifier_bias(self) -> Tensor | None:
        """Bias (V,), in the compute dtype."""
        return None if self.bias is None else self.bias.to(self.compute)

    @property
    def columns(self) -> int:
        """The number of columns of a chunk: V, or on CUDA a multiple of 64 if rows of V are not multiples of 16 bytes.

        Matrix products with unaligned rows are several times slower. The columns beyond V are 0.
        """
        vocabulary = self.weight.shape[0]
        if not self.weight.is_cuda or vocabulary % _ALIGNED == 0:
            return vocabulary
        return -(-vocabulary // _PADDED) * _PADDED

    @property
    def padded(self) -> "Linear":
        """The same call with zeros appended to classifier and bias, so that there are `columns` classes.

        It is not cached: if nothing is appended, that would be a reference cycle and keep memory alive.
        """
        more = self.columns - self.weight.shape[0]
        if not more:
            return self
        return replace(
            self,
            weight=_extended(self.weight, more),
            bias=None if self.bias is None else _extended(self.bias, more),
        )

    def without_padding(self, block: Tensor) -> Tensor:
        """Return the first V columns of a block (R, columns)."""
        vocabulary = self.weight.shape[0]
        return block if block.shape[1] == vocabulary else block[:, :vocabulary]

    def write_logits(self, hidden: Tensor, out: Tensor, classes: slice | None = None) -> None:
        """Write the logits (R, C) of these classes, by default all, to `out`, for hidden (R, D) in the compute dtype.

        `out` may be float32 if the compute dtype is narrower.
        """
        columns = self.classifier.t() if classes is None else self.classifier[classes].t()
        bias = None if self.bias is None else self.classifier_bias
        if bias is not None and classes is not None:
            bias = bias[classes]
        if out.dtype == hidden.dtype:
            if bias is None:
                torch.mm(hidden, columns, out=out)
            else:
                torch.addmm(bias, hidden, columns, out=out)
        elif hidden.is_cuda and WIDE_PRODUCTS:
            torch.mm(hidden, columns, out_dtype=out.dtype, out=out)
            if bias is not None:
                out.add_(bias)
        else:
            self._write_tiles(hidden.to(out.dtype), columns, out)
            if bias is not None:
                out.add_(bias)

    def _write_tiles(self, hidden: Tensor, columns: Tensor, out: Tensor) -> None:
        """Write hidden (R, D) @ columns (D, C) to `out`, in its dtype, converting some columns at a time."""
        step = max(_TILE_BYTES // max(columns.shape[0] * out.itemsize, 1), 1)
        for start in range(0, columns.shape[1], step):
            tile = slice(start, start + step)
            torch.mm(hidden, columns[:, tile].to(out.dtype), out=out[:, tile])

    def rows_per_chunk(self, itemsize: int | None = None, sums: bool = True) -> int:
        """Return the number of rows of a chunk of logits, with `itemsize` bytes per element.

        `sums`: whether gradients are accumulated over chunks.
        """
        rounds = sums and self.needs[1] and rounds_sums(self.compute, self.weight.dtype, self.weight.device)
        size, device, columns = itemsize or self.compute.itemsize, self.weight.device.type, self.columns
        if self.workspace is None and device != "cpu":
            # With wider logits a chunk has fewer rows, so that it takes no more memory than in the compute dtype.
            columns = columns * size // self.compute.itemsize
        return rows_per_chunk(self.hidden.shape[0], columns, size, self.workspace, device, rounds)


def compute_dtype(source: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "linear_") -> torch.dtype:
    """Return the dtype of the matrix products: autocast's, as for F.linear, otherwise that of all arguments.

    `prefix` is that of the names of weight and bias in error messages.
    """
    device = source.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    if autocast and torch.float64 not in (source.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != source.dtype:
            more = "; torch.autocast does not convert float64" if autocast else ", or call under torch.autocast"
            raise TypeError(
                f"{prefix}{name} must have the dtype of {prefix.removeprefix('linear_')}input, {source.dtype}, outside "
                f"of torch.autocast; got {tensor.dtype}: cast one to the dtype of the other{more}"
            )
    return source.dtype


def _extended(values: Tensor, more: int) -> Tensor:
    """Return values (V, ...) with `more` rows of zeros. `F.pad` would write all of its result twice."""
    made = values.new_empty((len(values) + more, *values.shape[1:]))
    made[: len(values)].copy_(values)
    made[len(values) :].zero_()
    return made
