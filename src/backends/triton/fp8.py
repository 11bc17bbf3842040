"""The arithmetic of 8-bit factors on GPUs: kernels, and products of `torch.nn.functional.scaled_mm`.

See `xent.backends.torch.fp8`. In Triton's interpreter the products are emulated.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.contract import Part
from xent.backends.torch.fp8 import CODES, Arithmetic, Entries, Factors, Quantized
from xent.backends.triton.kernels.fp8_kernels import (
    classes_kernel,
    codes_kernel,
    exact_kernel,
    hidden_kernel,
    magnitudes_kernel,
    runs_kernel,
)
from xent.backends.triton.largest import largest
from xent.backends.triton.launches import Kernel, cdiv, launch, next_power_of_2
from xent.core.call import Activation

__all__ = ["GpuArithmetic", "unavailable"]

_CAPABILITY = (8, 9)
_NEEDS = "precision='fp8' needs torch.nn.functional.scaled_mm, which PyTorch 2.10 has, and compute capability 8.9"
_RUN = 64  # entries of a class that a program sums
_TILE = {"ROWS": 64, "COLUMNS": 128}


def unavailable(device: torch.device) -> str | None:
    """Return why a device has no products in 8 bits, or None. Triton's interpreter emulates them."""
    if device.type != "cuda":
        return None
    if not hasattr(F, "scaled_mm"):
        return f"{_NEEDS}, and this is PyTorch {torch.__version__}"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"{_NEEDS}, and this is {torch.cuda.get_device_name(device)}"
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return None
    return _refused(device)


@cache
def _refused(device: torch.device) -> str | None:
    """Compute one product, and return why a device refuses it, or None."""
    arithmetic = GpuArithmetic()
    factors = torch.arange(32 * 48, device=device).view(32, 48).sin()
    codes, scale, _ = Arithmetic().quantize(factors, False)
    try:
        own = arithmetic.product(codes, scale, codes, scale)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        return f"{_NEEDS}, and this device refuses: {error}"
    return None if torch.allclose(own, Arithmetic().product(codes, scale, codes, scale), 0.02, 0.02) else _NEEDS


class GpuArithmetic(Arithmetic):
    """See `xent.backends.torch.fp8.Arithmetic`."""

    def quantize(self, matrix: Tensor, transposes: bool) -> Quantized:
        """Quantize the rows of a matrix."""
        matrix = _with_rows(matrix)
        codes, scale, _ = self.memory(len(matrix), matrix.shape[1], matrix.device)
        transposed = torch.empty(codes.shape[::-1], dtype=CODES, device=codes.device) if transposes else None
        largest = torch.zeros_like(scale)
        _over_tiles(magnitudes_kernel, matrix, None, None, largest, None)
        _over_tiles(codes_kernel, matrix, codes, largest, scale, None, transposed, None, None, None)
        return Quantized(codes, scale, transposed)

    def quantize_gradient(self, grad: Tensor, rows: Factors | None, columns: Factors | None) -> None:
        """Quantize rows and columns of the gradient of logits."""
        class_scale, row_scale = (None if factors is None else factors.of_others for factors in (rows, columns))
        largest_of_rows, largest_of_columns = (
            None if factors is None else torch.zeros_like(factors.scale) for factors in (rows, columns)
        )
        _over_tiles(magnitudes_kernel, grad, row_scale, class_scale, largest_of_rows, largest_of_columns)
        row_codes, scale_of_rows = (None, None) if rows is None else rows[:2]
        column_codes, scale_of_columns = (None, None) if columns is None else columns[:2]
        _over_tiles(
            *(codes_kernel, grad, row_codes, largest_of_rows, scale_of_rows, class_scale),
            *(column_codes, largest_of_columns, scale_of_columns, row_scale),
        )

    def product(self, left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> Tensor:
        """Return a product of codes."""
        if left.device.type != "cuda":
            return super().product(left, left_scale, right, right_scale)
        by_row: Any = F.ScalingType.RowWise
        product: Tensor = F.scaled_mm(
            *(left, right.t(), left_scale[:, None], by_row, right_scale[None, :], by_row),
            output_dtype=torch.bfloat16,
            use_fast_accum=False,  # Hopper's fast sums keep fewer bits than float32
        )
        return product

    def likeliest(self, logits: Tensor, count: int) -> Tensor:
        """Return the classes of the largest logits of each row."""
        return largest(logits, count, Activation())[0]

    def correct(self, logits: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> None:
        """Write the exact logits of some classes."""
        size, entries = hidden.shape[1], ids.shape[1]
        hidden = _with_rows(hidden)
        launch(
            exact_kernel,
            len(logits),
            (
                *(logits, logits.stride(0), hidden, hidden.stride(0), weight, *weight.stride()),
                *(None if bias is None else bias.contiguous(), ids, entries, size),
            ),
            {"ENTRIES": next_power_of_2(entries), "BLOCK": min(next_power_of_2(size), 512)},
            num_warps=4,
        )

    def put_hidden(self, product: Tensor, weight: Tensor, entries: Entries, part: Part, out: Tensor) -> None:
        """Write the gradient of the hidden states of a part."""
        size = out.shape[1]
        launch(
            hidden_kernel,
            part.stop - part.start,
            (
                *(product, product.stride(0), weight, *weight.stride(), *entries, part.rows),
                *(part.start, out, len(weight), entries.ids.shape[1], size),
            ),
            {"BLOCK": min(next_power_of_2(size), 1024)},
            num_warps=4,
        )

    def add_to_classes(self, total: Tensor, hidden: Tensor, entries: Entries) -> None:
        """Add the exact entries' part to the gradient of the classifier."""
        size, (ordered, order) = total.shape[1], entries.ids.flatten().sort(stable=True)
        hidden, count, block = _with_rows(hidden), len(ordered), min(next_power_of_2(size), 512)
        runs = cdiv(count, _RUN)
        sums = torch.empty(2 * runs, size, dtype=torch.float32, device=total.device)
        long_runs = torch.full((runs,), -1, dtype=torch.int64, device=total.device)
        begins = torch.searchsorted(ordered, ordered)
        launch(
            classes_kernel,
            count * cdiv(size, block),
            (
                *(total, hidden, hidden.stride(0), entries.grads, ordered, order, begins, sums, long_runs),
                *(count, entries.ids.shape[1], len(total), size),
            ),
            {"ALIGNED": _is_aligned(hidden), "MOST": _RUN, "ROWS": 16, "BLOCK": block},
            num_warps=8,
        )
        joined = total, ordered, sums, long_runs, count, size
        launch(runs_kernel, runs * cdiv(size, block), joined, {"MOST": _RUN, "BLOCK": block}, num_warps=4)


def _over_tiles(function: Kernel, matrix: Tensor, *others: Tensor | None) -> None:
    """Launch a kernel with one program per tile of a matrix."""
    rows, columns = matrix.shape
    launch(
        function,
        cdiv(rows, _TILE["ROWS"]) * cdiv(columns, _TILE["COLUMNS"]),
        (matrix, matrix.stride(0), rows, columns, *others),
        {"ALIGNED": _is_aligned(matrix), **_TILE},
        num_warps=4,
    )


def _with_rows(matrix: Tensor) -> Tensor:
    """Return a matrix with adjacent columns."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _is_aligned(matrix: Tensor) -> bool:
    """Return whether rows begin at multiples of 16 bytes, and have a multiple of 16 columns."""
    starts = matrix.data_ptr() | matrix.stride(0) * matrix.itemsize
    return matrix.shape[1] % 16 == 0 and starts % 16 == 0
