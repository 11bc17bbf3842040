"""The two matrix products for Hopper GPUs: the calls that they serve, and their launches. Neither stores logits.

They serve target classes without label smoothing, without bias, temperatures per row, and options that are tensors.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Part, Taken, wide
from xent.backends.torch.products import Classifier
from xent.backends.triton.hopper import probe
from xent.backends.triton.inputs import Inputs
from xent.backends.triton.kernels.join_kernel import join_kernel
from xent.backends.triton.prepared import cdiv, launch
from xent.core.call import Classes, Product
from xent.core.chunks import tile_shape

__all__ = ["fold_chunks", "fold_product", "gradient_product", "write_gradient"]

_LARGEST_SOFTCAP = 256  # the kernels compute k tanh(v / k) with an error of about k / 10^7, too much if k is large
_BAND = 128  # rows of a tile
_CLASSES = 256  # classes of a tile
_DEPTH = 64  # width of a slice of both factors: 128 bytes, which the copy engine can swizzle
_SLOTS = 4
_WARPS = 4
_ENTRY_REGISTERS = 168  # registers per thread at entry, for three groups of four warps, before they are redistributed
_REGISTERS = 240
_GROUP = 12  # bands computed at the same time, so that their rows and the classes that they share stay in the L2 cache
_MOST_CHUNKS = 320  # chunks of the vocabulary, each with its own sums
_SUMS_BYTES = 32 * 2**20  # bytes of the sums of all chunks in a launch
_JOINED = 32  # rows of a program of `join_kernel`


def _serve(inputs: Inputs, source: Classifier) -> bool:
    """Return whether the kernels serve a call, with hidden states of any strides."""
    weight, rows = source.weight, inputs.plain_rows
    if not isinstance(inputs.setting.call.target, Classes) or inputs.smoothed or source.bias is not None:
        return False
    if rows.numbers is not None or rows.temperature is not None or inputs.scales[0] > _LARGEST_SOFTCAP:
        return False
    # Hidden states may be copied to contiguous memory. Then their rows are D elements apart.
    fits = len(weight) >= _CLASSES and _can_be_copied(weight) and weight.shape[1] * weight.itemsize % 16 == 0
    return fits and probe.is_on(weight.device)


def fold_product(steps: Any, source: Classifier, taken: Taken, part: Part, sums: Tensor) -> bool:
    """See `xent.backends.torch.contract.Steps.fold_product`. A row's bits do not depend on the other rows.

    An exact call has the same bits whatever statistics it returns: sums that the product lacks take a second pass over
    tiles. Other calls then take all sums from tiles.
    """
    inputs: Inputs = steps.inputs
    setting, columns = inputs.setting, inputs.columns
    lacks = max(columns["SQUARES"], columns["DEFICIT"], columns["KEY"]) >= 0
    if not _serve(inputs, source) or taken.target_logits is None or (lacks and not setting.call.options.exact):
        return False
    if lacks:
        _fold_tiles(steps, source, taken, part, sums)
    hidden, targets, entropy = _copyable(taken.hidden), inputs.plain_rows.target[part.indices], columns["MIXED"] >= 0
    classes = (targets - setting.first if setting.first else targets).to(torch.int32)
    size = 4 * (3 if entropy else 2) * _walk(1, source.weight)[2]
    step = max(min(_workspace(inputs) or _SUMS_BYTES, _SUMS_BYTES) // size // _BAND, _GROUP) * _BAND
    for start in range(0, len(hidden), step):
        some = slice(start, start + step)
        made = fold_chunks(hidden[some], source.weight, classes[some], inputs.scales, inputs.constants, entropy)
        rows, first = inputs.rows_of(part, start)
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
                inputs.ignore_index,
                setting.first,
                setting.width,
                setting.vocabulary,
            ),
            {
                **{name: columns[name] for name in ("WEIGHT", "MIXED", "SQUARES", "DEFICIT", "COUNTED", "ID")},
                "BLOCK": _JOINED,
                "PARTS": 32,
            },
            num_warps=4,
        )
    return True


def _fold_tiles(steps: Any, source: Classifier, taken: Taken, part: Part, sums: Tensor) -> None:
    """Write all sums of a part from tiles of float32 logits that are overwritten."""
    dtype, count = wide(source.compute), len(taken.hidden)
    rows, width = tile_shape(count, source.classes, dtype.itemsize, _workspace(steps.inputs))
    room = torch.empty(rows * width, dtype=dtype, device=taken.hidden.device)
    for start in range(0, count, rows):
        some = slice(start, min(start + rows, count))
        for first in range(0, source.classes, width):
            classes = slice(first, min(first + width, source.classes))
            logits = room[: (some.stop - start) * (classes.stop - first)].view(some.stop - start, -1)
            source.write_logits(taken.hidden[some], logits, classes)
            targets = None if taken.target_logits is None else taken.target_logits[some]
            steps.fold(Block(logits, start, first, None, targets), part, sums[:, some], first > 0)


def gradient_product(
    steps: Any, source: Classifier, taken: Taken, part: Part, coefficients: Tensor, grad: Tensor
) -> bool:
    """See `xent.backends.torch.contract.Steps.gradient_product`. `coefficients` (6, R) are those of `finish_kernel`."""
    inputs: Inputs = steps.inputs
    if not _serve(inputs, source) or grad.dtype != source.compute or grad.data_ptr() % 16 or grad.stride(0) % 8:
        return False
    classes, tilted = coefficients[5].view(torch.int32), inputs.upstreams.entropy is not None
    write_gradient(taken.hidden, source.weight, classes, coefficients, grad, inputs.scales, inputs.constants, tilted)
    return True


def fold_chunks(
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    numbers: tuple[float, float],
    constants: dict[str, bool],
    entropy: bool,
) -> Tensor:
    """Return the sums of hidden states (R, D) over chunks of the classes, (2 or 3, chunks, R) float32.

    They are the largest x, the sum of e = e^(x - largest), and with `entropy` the sum of e log2 e, without the class
    `classes` (R,) int32. Logits stay in registers in float32. `numbers` are softcap and logit scale.
    """
    from xent.backends.triton.hopper.product_kernel import product_kernel

    made = hidden.new_empty(3 if entropy else 2, _walk(1, weight)[2], len(hidden), dtype=torch.float32)
    arguments = classes, made[0], made[1], made[-1], len(hidden), len(weight)
    _launch(product_kernel, hidden, weight, arguments, numbers, constants, {"ENTROPY": entropy})
    return made


def write_gradient(
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    coefficients: Tensor,
    grad: Tensor,
    numbers: tuple[float, float],
    constants: dict[str, bool],
    tilted: bool,
) -> None:
    """Write the gradient (R, 8n) of the logits of hidden states (R, D); 0 in columns beyond the vocabulary.

    `classes` (R,) int32, -2 in rows without a gradient. `coefficients` (4 or more, R) float32: m, factor, the target's
    gradient, tilt.
    """
    from xent.backends.triton.hopper.gradient_product_kernel import gradient_product_kernel

    arguments = classes, coefficients, grad, len(hidden), len(weight), grad.stride(0) // 8
    _launch(gradient_product_kernel, _copyable(hidden), weight, arguments, numbers, constants, {"TILTED": tilted})


def _launch(
    kernel: Any,
    hidden: Tensor,
    weight: Tensor,
    arguments: tuple[Any, ...],
    numbers: tuple[float, float],
    constants: dict[str, bool],
    other: dict[str, bool],
) -> None:
    factors = _descriptor(hidden, [_BAND // 2, _DEPTH]), _descriptor(weight, [_CLASSES, _DEPTH])
    launch(
        kernel,
        probe.multiprocessors(hidden.device),
        (*factors, *arguments, *_walk(len(hidden), weight), *numbers),
        {
            "SLOTS": _SLOTS,
            "SCALED": constants["SCALED"],
            "CAPPED": constants["CAPPED"],
            **other,
            "REGISTERS": _REGISTERS,
        },
        num_warps=_WARPS,
        maxnreg=_ENTRY_REGISTERS,
    )


def _workspace(inputs: Inputs) -> int | None:
    source = inputs.setting.call.source
    assert isinstance(source, Product)
    return source.workspace


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
