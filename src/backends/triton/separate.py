"""The steps of a row one by one: launches of the kernels that fold, finish and differentiate rows.

They serve target classes. `steps` is a `xent.backends.triton.steps.TritonSteps`. Coefficients are (6, R) float32, see
`finish_kernel`.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Part
from xent.backends.triton.geometry import in_blocks, sizes
from xent.backends.triton.groups import Way
from xent.backends.triton.hopper.products import fold_product, gradient_product
from xent.backends.triton.inputs import Inputs
from xent.backends.triton.kernels.finish_kernel import finish_kernel
from xent.backends.triton.kernels.fold_kernel import fold_kernel
from xent.backends.triton.kernels.gradient_kernel import gradient_kernel
from xent.backends.triton.prepared import cdiv, launch, next_power_of_2
from xent.backends.triton.whole import placed

__all__ = ["finish", "fold", "fold_product", "gradient", "gradient_product"]

_BLOCK_BYTES = 4096  # of the gradient, and of tiles
_GRADIENT_BLOCKS = 4  # blocks of a program
_FINISHED = 64  # rows of a program of `finish_kernel`


def fold(steps: Any, block: Block, part: Part, sums: Tensor, adds: bool) -> None:
    """See `xent.backends.torch.contract.Steps.fold`. One program per row."""
    inputs: Inputs = steps.inputs
    setting, weight, columns = inputs.setting, inputs.rows.class_weight, inputs.columns
    for one in placed(block):
        logits, place, count = one.logits, one.place, one.count
        width, begin = logits.shape[-1], one.start - block.start
        if 0 < width < setting.width:
            size = in_blocks(width, place, _BLOCK_BYTES // logits.itemsize, 1, 1, {"num_warps": 4})
        else:
            predicts = columns.key >= 0
            size = sizes(max(width, 1), logits.itemsize, place, False, predicts, inputs.capped, False)
        total = inputs.rows.total_weight
        if weight is not None and total is not None and width < len(weight):
            total = weight[block.first : block.first + width].sum()
        rows, first = inputs.rows_of(part, one.start)
        some = sums[:, begin : begin + count]
        launch(
            fold_kernel,
            count,
            (
                logits,
                *place.logits,
                place.skew,
                some,
                some.stride(0),
                None if block.target_logits is None else block.target_logits[begin : begin + count],
                rows,
                first,
                total,
                inputs.ignore_index,
                setting.first + block.first,
                block.first,
                width,
                setting.vocabulary,
                *inputs.scales,
            ),
            {
                "columns": columns,
                "way": Way(
                    **inputs.way,
                    entropy=columns.mixed >= 0,
                    squared=columns.squares >= 0,
                    averaged=columns.deficit >= 0,
                    predicted=columns.key >= 0,
                    quick=inputs.quick(logits.itemsize == 2),
                    **place.constants(),
                    **size.constants(),
                ),
                "COLUMNS": len(sums),
                "ADDS": adds,
            },
            **size.options,
            **place.options(),
        )


def finish(steps: Any, sums: Tensor, part: Part, wanted: bool, saved: Tensor | None) -> Tensor | None:
    """See `xent.backends.torch.contract.Steps.finish`."""
    inputs: Inputs = steps.inputs
    setting = inputs.setting
    ranks, _, count = sums.shape
    made = torch.empty(6, count, dtype=torch.float32, device=sums.device) if wanted else None
    rows, first = inputs.rows_of(part)
    if count:
        launch(
            finish_kernel,
            cdiv(count, _FINISHED),
            (
                sums,
                sums.stride(0),
                ranks,
                count,
                rows,
                first,
                steps.recorded,
                inputs.upstreams,
                saved,
                0 if saved is None else saved.stride(0),
                made,
                inputs.ignore_index,
                setting.first,
                setting.width,
                setting.vocabulary,
                *inputs.weights,
                *inputs.scales,
            ),
            {"columns": inputs.columns, "way": Way(**inputs.way), "BLOCK": _FINISHED},
            num_warps=2,
        )
    return made


def gradient(steps: Any, block: Block, part: Part, coefficients: Tensor) -> None:
    """See `xent.backends.torch.contract.Steps.gradient`. One program per part of a row."""
    inputs: Inputs = steps.inputs
    for one in placed(block):
        logits, grad, place, width = one.logits, one.grad, one.place, one.logits.shape[-1]
        assert grad is not None
        if not width:
            continue
        itemsize = logits.itemsize
        size = max(min(next_power_of_2(width), _BLOCK_BYTES // itemsize), 2 * place.vector)
        blocks = max(min(_GRADIENT_BLOCKS, cdiv(width, size)), 1)
        rows, first = inputs.rows_of(part, one.start)
        launch(
            gradient_kernel,
            one.count * cdiv(width + (place.vector - 1 if place.skewed else 0), blocks * size),
            (
                *one.memory,
                coefficients[:, one.start :],
                coefficients.stride(0),
                rows,
                first,
                block.first,
                width,
                *inputs.scales,
            ),
            {
                "way": Way(**inputs.way, quick=inputs.quick(itemsize == 2), block=size, **place.constants()),
                "BLOCKS": blocks,
            },
            num_warps=max(size * itemsize // 1024, 1),
            maxnreg=64,
            **place.options(),
        )
