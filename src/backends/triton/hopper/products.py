"""The two matrix products for Hopper GPUs: the calls that they serve, and their launches. Neither stores logits.

They serve target classes without label smoothing, without bias, temperatures per row, and options that are tensors.

Gluon, Triton's lower-level language, is not stable. The kernels are on where they compile and agree with PyTorch in a
small computation, which runs once per process, before the first product that they serve. It never runs while a CUDA
graph is captured: if nothing ran before, the kernels stay off, so that the results of a process do not change.
"""

import math
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Part, Taken, wide
from xent.backends.torch.products import Classifier
from xent.backends.torch.sources import fold_tiles
from xent.backends.triton.kernels.sums import join_kernel
from xent.backends.triton.launches import cdiv, launch
from xent.backends.triton.machine import DEVICES, multiprocessors
from xent.core.call import Classes

__all__ = ["fold_chunks", "fold_product", "gradient_product", "is_on", "note", "write_gradient"]

_BAND = 128  # rows of a tile
_CLASSES = 256  # classes of a tile
_DEPTH = 64  # width of a slice of both factors: 128 bytes, which the copy engine can swizzle
_SLOTS = 4
_WARPS = 4
_ENTRY_REGISTERS = 168  # registers per thread at entry, for three groups of four warps, before they are redistributed
_REGISTERS = 240
_GROUP = 12  # bands computed at the same time, so that their rows and the classes that they share stay in the L2 cache
_MOST_CHUNKS = 320  # chunks of the vocabulary, each with its own sums
_LARGEST_SOFTCAP = 256  # the kernels compute k tanh(v / k) with an error of about k / 10^7, too much if k is large
_SUMS_BYTES = 32 * 2**20  # bytes of the sums of all chunks in a launch
_JOINED = 32  # rows of a program of `join_kernel`
_HOPPER = 9
_result: list[str | None] = []  # the reason why the kernels are off, None if they are on; empty before the probe
_PROBED = 200, 600, 136  # rows, classes and width: partial tiles
_SOFTCAP, _SCALE = 4.0, 0.7


def fold_chunks(
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    bend: tuple[float | None, float | None],
    entropy: bool,
) -> Tensor:
    """Return the sums of hidden states (R, D) over chunks of the classes, (2 or 3, chunks, R) float32.

    They are the largest x, the sum of e = e^(x - largest), and with `entropy` the sum of e log2 e, without the class
    `classes` (R,) int32. Logits stay in registers in float32. `bend` is (logit scale or None, softcap or None).
    """
    from xent.backends.triton.hopper.product_kernel import product_kernel

    made = hidden.new_empty(3 if entropy else 2, _walk(1, weight)[2], len(hidden), dtype=torch.float32)
    arguments = classes, made[0], made[1], made[-1], len(hidden), len(weight)
    _launch(product_kernel, hidden, weight, arguments, bend, {"ENTROPY": entropy})
    return made


def write_gradient(
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    coefficients: Tensor,
    grad: Tensor,
    bend: tuple[float | None, float | None],
    tilted: bool,
) -> None:
    """Write the gradient (R, 8n) of the logits of hidden states (R, D); 0 in columns beyond the vocabulary.

    `classes` (R,) int32, -2 in rows without a gradient. `coefficients` (4 or more, R) float32: m, factor, the target's
    gradient, tilt.
    """
    from xent.backends.triton.hopper.gradient_product_kernel import gradient_product_kernel

    arguments = classes, coefficients, grad, len(hidden), len(weight), grad.stride(0) // 8
    _launch(gradient_product_kernel, _copyable(hidden), weight, arguments, bend, {"TILTED": tilted})


def _launch(
    kernel: Any,
    hidden: Tensor,
    weight: Tensor,
    arguments: tuple[Any, ...],
    bend: tuple[float | None, float | None],
    other: dict[str, bool],
) -> None:
    factors = _descriptor(hidden, [_BAND // 2, _DEPTH]), _descriptor(weight, [_CLASSES, _DEPTH])
    numbers = [0.0 if number is None else number for number in bend]
    scaled, capped = (number is not None for number in bend)
    launch(
        kernel,
        multiprocessors(hidden.device),
        (*factors, *arguments, *_walk(len(hidden), weight), *numbers),
        {"SLOTS": _SLOTS, "SCALED": scaled, "CAPPED": capped, **other, "REGISTERS": _REGISTERS},
        num_warps=_WARPS,
        maxnreg=_ENTRY_REGISTERS,
    )


def _walk(rows: int, classifier: Tensor) -> tuple[int, int, int, int, int, int]:
    """Return (units, group, chunks, tiles per chunk, tiles per row, slices of the width).

    The chunks depend on the vocabulary only.
    """
    vocabulary, width = classifier.shape
    tiles = cdiv(vocabulary, _CLASSES)
    of_chunk = cdiv(tiles, _MOST_CHUNKS)
    chunks = cdiv(tiles, of_chunk)
    return cdiv(rows, _BAND) * chunks, _GROUP, chunks, of_chunk, tiles, cdiv(width, _DEPTH)


def _can_be_copied(matrix: Tensor) -> bool:
    """Return whether the copy engine supports a matrix: 16-bit elements, rows at multiples of 16 bytes, no overlap."""
    if matrix.dtype not in (torch.bfloat16, torch.float16):
        return False
    pitch, width = matrix.stride(0), matrix.shape[1]
    aligned = matrix.stride(1) == 1 and pitch * matrix.itemsize % 16 == 0 and matrix.data_ptr() % 16 == 0
    return aligned and 0 < width <= pitch


def _copyable(matrix: Tensor) -> Tensor:
    """Return the matrix, or a contiguous copy if the copy engine does not support the matrix itself."""
    return matrix if _can_be_copied(matrix) else matrix.clone(memory_format=torch.contiguous_format)


def _descriptor(matrix: Tensor, block: list[int]) -> Any:
    """Return the copy engine's descriptor of a matrix. Rows of a block are swizzled by 128 bytes in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], block, _layout(8 * matrix.itemsize))


@cache
def _layout(bits: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)


def _serve(steps: Any, source: Classifier) -> bool:
    """Return whether the kernels serve a call, with hidden states of any strides."""
    weight, rows = source.weight, steps.plain_rows
    if not isinstance(steps.setting.call.target, Classes) or steps.way.smoothed or source.bias is not None:
        return False
    if rows.numbers is not None or rows.temperature is not None or steps.numbers.softcap > _LARGEST_SOFTCAP:
        return False
    # Hidden states may be copied to contiguous memory. Then their rows are D elements apart.
    fits = len(weight) >= _CLASSES and _can_be_copied(weight) and weight.shape[1] * weight.itemsize % 16 == 0
    return fits and is_on(weight.device)


def fold_product(steps: Any, source: Classifier, taken: Taken, part: Part, sums: Tensor) -> bool:
    """See `xent.backends.torch.contract.Steps.fold_product`. A row's bits do not depend on the other rows.

    An exact call has the same bits whatever statistics it returns: sums that the product lacks take a second pass over
    tiles. Other calls then take all sums from tiles. `steps` are `xent.backends.triton.steps.TritonSteps`.
    """
    setting, columns = steps.setting, steps.columns
    lacks = max(columns.squares, columns.deficit, columns.key) >= 0
    if not _serve(steps, source) or taken.target_logits is None or (lacks and not setting.call.options.exact):
        return False
    workspace = setting.call.source.workspace
    if lacks:
        fold_tiles(steps, source, taken, part, sums, wide(source.compute), workspace)
    hidden, targets, entropy = _copyable(taken.hidden), steps.plain_rows.target[part.indices], columns.mixed >= 0
    classes = (targets - setting.first if setting.first else targets).to(torch.int32)
    size = 4 * (3 if entropy else 2) * _walk(1, source.weight)[2]
    step = max(min(workspace or _SUMS_BYTES, _SUMS_BYTES) // size // _BAND, _GROUP) * _BAND
    for start in range(0, len(hidden), step):
        some = slice(start, start + step)
        made = fold_chunks(hidden[some], source.weight, classes[some], _bend(steps), entropy)
        rows, first = steps.rows_of(part, start)
        launch(
            join_kernel,
            cdiv(made.shape[2], _JOINED),
            (
                made,
                made.shape[1],
                made.shape[2],
                sums[:, some],
                sums.stride(0),
                taken.target_logits[some],
                rows,
                first,
                steps.ignore_index,
                setting.first,
                setting.width,
                setting.vocabulary,
            ),
            {"columns": columns, "BLOCK": _JOINED, "PARTS": 32},
            num_warps=4,
        )
        del made  # before the memory of the next sums is allocated
    return True


def gradient_product(
    steps: Any, source: Classifier, taken: Taken, part: Part, coefficients: Tensor, grad: Tensor
) -> bool:
    """See `xent.backends.torch.contract.Steps.gradient_product`. `coefficients` (6, R) are those of `finish_kernel`."""
    if not _serve(steps, source) or grad.dtype != source.compute or grad.data_ptr() % 16 or grad.stride(0) % 8:
        return False
    classes = coefficients[5].view(torch.int32)
    write_gradient(taken.hidden, source.weight, classes, coefficients, grad, _bend(steps), steps.way.tilted)
    return True


def _bend(steps: Any) -> tuple[float | None, float | None]:
    numbers, way = steps.numbers, steps.way
    return numbers.logit_scale if way.scaled else None, numbers.softcap if way.capped else None


def is_on(device: torch.device) -> bool:
    """Return whether the kernels are used on a device."""
    return _is_hopper(device) and _closed() is None


@cache
def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or DEVICES != ("cuda",) or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_properties(device).major == _HOPPER


def note() -> str:
    """Return a sentence for `python -m xent`: whether the Hopper kernels are used on the current GPU."""
    reason: str | None
    if DEVICES != ("cuda",):
        reason = "no GPU"
    elif not _is_hopper(torch.device("cuda", torch.cuda.current_device())):
        reason = "the GPU is no Hopper"
    else:
        reason = _closed()
    return "Hopper kernels: on" if reason is None else f"Hopper kernels: off, {reason}"


def _closed() -> str | None:
    """Return the reason why the kernels are off, after the probe; None if they are on."""
    if not _result:
        if os.environ.get("XENT_PORTABLE") == "1":
            _result.append("XENT_PORTABLE=1")
        elif torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            _result.append("the first call of the process was captured in a CUDA graph")
        else:
            try:
                _result.append(_probe())
            except Exception as error:  # Triton raises many kinds
                _result.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    return _result[0]


def _probe() -> str | None:
    """Return None if both kernels agree with PyTorch."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows, count, width = _PROBED
    numbers = torch.arange(count * width, device=device, dtype=torch.float32)
    weight = torch.sin(numbers).view(count, width).to(torch.bfloat16)
    hidden = torch.cos(0.3 * numbers[: rows * width]).view(rows, width).to(torch.bfloat16)
    classes = torch.arange(rows, device=device, dtype=torch.int32) * 3
    classes[-1] = -2
    targets = classes[:-1, None].long()
    bend = _SCALE, _SOFTCAP
    x = torch.tanh(hidden.double() @ weight.double().t() * (_SCALE / _SOFTCAP)) * _SOFTCAP

    peaks, totals, mixed = fold_chunks(hidden, weight, classes, bend, True).double()
    e = x.exp()
    e[:-1].scatter_(1, targets, 0.0)
    rest, moment = peaks.exp() * totals, peaks.exp() * (mixed * math.log(2) + peaks * totals)
    if not (_agree(rest.sum(0), e.sum(1), 1e-4) and _agree(moment.sum(0), (e * x).sum(1), 1e-4)):
        return "their sums differ from PyTorch's"

    zero = torch.zeros(rows, device=device)
    grad = torch.full((rows, count + 8), torch.nan, device=device, dtype=torch.bfloat16)
    coefficients = torch.stack((zero, zero + 0.5, zero - 1, zero + 0.1))
    write_gradient(hidden, weight, classes, coefficients, grad, bend, True)
    expected = x.exp() * (0.5 + 0.1 / math.log(2) * x) * _SCALE * (1 - (x / _SOFTCAP).square())
    expected[:-1].scatter_(1, targets, -1.0)
    expected[-1] = 0
    same = _agree(grad[:, :count].double(), expected, 1e-2) and not bool(grad[:, count:].any())
    return None if same else "their gradients differ from PyTorch's"


def _agree(values: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether values are within a tolerance of those expected, relative to the largest."""
    return bool(((values - expected).abs() <= tolerance * expected.abs().max()).all())
