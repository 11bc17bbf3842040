"""The classifier's side of a linear loss: hidden states, weight, bias, and which gradients somebody asked for."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.product_sum import rounds_sums
from xent.core.chunks import rows_per_chunk

__all__ = ["Linear"]

WIDE_PRODUCTS = "dtype_out" in torch.ops.aten.mm.overloads()
_ALIGNED, _PADDED = 8, 64  # elements
_TILE_BYTES = 4 * 2**20


@dataclass(frozen=True, eq=False)
class Linear:
    """The arguments of a linear loss that are no options."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    shift: int
    workspace: int | None
    compute: torch.dtype
    needs: tuple[bool, bool, bool]
    """Gradients of input, weight, bias."""

    @cached_property
    def hidden(self) -> Tensor:
        """(N, D), in the caller's dtype."""
        return self.input.reshape(self.input.shape[:-1].numel(), self.input.shape[-1])

    @cached_property
    def classifier(self) -> Tensor:
        """(V, D), in the compute dtype."""
        return self.weight.to(self.compute)

    @cached_property
    def classifier_bias(self) -> Tensor | None:
        """(V,), in the compute dtype."""
        return None if self.bias is None else self.bias.to(self.compute)

    @cached_property
    def columns(self) -> int:
        """How many columns the logits of a chunk have: V, or more on CUDA where V is not a multiple of 16 bytes.

        Products of rows off boundaries are several times slower. The columns beyond V are 0 throughout.
        """
        vocabulary = len(self.weight)
        if self.weight.device.type != "cuda" or vocabulary % _ALIGNED == 0:
            return vocabulary
        return -(-vocabulary // _PADDED) * _PADDED

    @property
    def padded(self) -> "Linear":
        """The same with rows of zeros below the classifier, and of the bias, so that it has `columns` classes.

        Not cached: where it is the same, that would be a cycle of references, and hold its memory.
        """
        more = self.columns - len(self.weight)
        if not more:
            return self
        return replace(
            self,
            weight=F.pad(self.weight, (0, 0, 0, more)),
            bias=None if self.bias is None else F.pad(self.bias, (0, more)),
        )

    def write_logits(self, hidden: Tensor, out: Tensor, classes: slice = slice(None)) -> None:
        """Write the logits (R, C) of those classes to `out`, for hidden (R, D) in the compute dtype.

        `out` may be float32 where that is wider.
        """
        columns = self.classifier[classes].t()
        bias = None if self.classifier_bias is None else self.classifier_bias[classes]
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
        """Write hidden (R, D) @ columns (D, C) to `out`, in its dtype, without so large a copy of all columns."""
        step = max(_TILE_BYTES // max(columns.shape[0] * out.itemsize, 1), 1)
        for start in range(0, columns.shape[1], step):
            tile = slice(start, start + step)
            torch.mm(hidden, columns[:, tile].to(out.dtype), out=out[:, tile])

    def rows_per_chunk(self, itemsize: int | None = None, sums: bool = True) -> int:
        """Return how many rows of logits are alive at one time, `itemsize` bytes each element.

        `sums`: whether gradients are added up over chunks.
        """
        rounds = sums and self.needs[1] and rounds_sums(self.compute, self.weight.dtype, self.weight.device)
        size, device, columns = itemsize or self.compute.itemsize, self.weight.device.type, self.columns
        if self.workspace is None and device != "cpu":
            # Wider logits get fewer rows, so that a chunk takes no more memory than in the compute dtype.
            columns = columns * size // self.compute.itemsize
        return rows_per_chunk(len(self.hidden), columns, size, self.workspace, device, rounds)
