"""The two matrix products for Hopper GPUs: the calls that they serve, and their launches. Neither stores logits.

They serve target classes without label smoothing, without bias, temperatures per row, and options that are tensors.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Part, Taken, wide
from xent.backends.torch.products import Classifier
from xent.backends.triton.hopper import probe
from xent.backends.triton.hopper.launches import (
    BAND,
    CLASSES,
    GROUP,
    can_be_copied,
    copyable,
    fold_chunks,
    walk,
    write_gradient,
)
from xent.backends.triton.inputs import Inputs
from xent.backends.triton.kernels.join_kernel import join_kernel
from xent.backends.triton.prepared import cdiv, launch
from xent.core.call import Classes, Product
from xent.core.chunks import tile_shape

__all__ = ["fold_product", "gradient_product"]

_LARGEST_SOFTCAP = 256  # the kernels compute k tanh(v / k) with an error of about k / 10^7, too much if k is large
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
    fits = len(weight) >= CLASSES and can_be_copied(weight) and weight.shape[1] * weight.itemsize % 16 == 0
    return fits and probe.is_on(weight.device)


def fold_product(steps: Any, source: Classifier, taken: Taken, part: Part, sums: Tensor) -> bool:
    """See `xent.backends.torch.contract.Steps.fold_product`. A row's bits do not depend on the other rows.

    An exact call has the same bits whatever statistics it returns: sums that the product lacks take a second pass over
    tiles. Other calls then take all sums from tiles.
    """
    inputs: Inputs = steps.inputs
    setting, columns = inputs.setting, inputs.columns
    lacks = max(columns.squares, columns.deficit, columns.key) >= 0
    if not _serve(inputs, source) or taken.target_logits is None or (lacks and not setting.call.options.exact):
        return False
    if lacks:
        _fold_tiles(steps, source, taken, part, sums)
    hidden, targets, entropy = copyable(taken.hidden), inputs.plain_rows.target[part.indices], columns.mixed >= 0
    classes = (targets - setting.first if setting.first else targets).to(torch.int32)
    size = 4 * (3 if entropy else 2) * walk(1, source.weight)[2]
    step = max(min(_workspace(inputs) or _SUMS_BYTES, _SUMS_BYTES) // size // BAND, GROUP) * BAND
    for start in range(0, len(hidden), step):
        some = slice(start, start + step)
        made = fold_chunks(hidden[some], source.weight, classes[some], _bend(inputs), entropy)
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
            {"columns": columns, "BLOCK": _JOINED, "PARTS": 32},
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
    write_gradient(taken.hidden, source.weight, classes, coefficients, grad, _bend(inputs), tilted)
    return True


def _bend(inputs: Inputs) -> tuple[float | None, float | None]:
    softcap, scale = inputs.scales
    return scale if inputs.scaled else None, softcap if inputs.capped else None


def _workspace(inputs: Inputs) -> int | None:
    source = inputs.setting.call.source
    assert isinstance(source, Product)
    return source.workspace
