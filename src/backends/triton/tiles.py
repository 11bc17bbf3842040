"""A fold over tiles of logits that are made and forgotten: forward passes that need no gradient of the logits."""

from typing import NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.linear_call import Linear
from xent.backends.triton.hopper.product import fold_product
from xent.backends.triton.launch import launch, next_power_of_2
from xent.backends.triton.tile_kernels import tile_kernel
from xent.core.chunks import tile_shape
from xent.core.spec import LossSpec

__all__ = ["Sums", "fold"]


class Sums(NamedTuple):
    """The sums of N rows without their targets, as `tile_kernels` has them."""

    peaks: Tensor
    totals: Tensor
    mixed: Tensor | None
    below: Tensor | None
    seen: Tensor | None
    best: Tensor | None
    at: Tensor | None


def fold(linear: Linear, spec: LossSpec, classes: Tensor, class_weight: Tensor | None) -> Sums:
    """Return the sums over all classes but each row's target, `classes` (N,) int32."""
    count, device = len(classes), classes.device
    names = spec.stats

    def memory(wanted: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(count, dtype=dtype, device=device) if wanted else None

    smoothed, predicted = spec.label_smoothing != 0, "predictions" in names or "accuracy" in names
    peaks, totals = torch.empty(2, count, dtype=torch.float32, device=device)
    entropy = memory("entropy" in names)
    sums = Sums(
        peaks, totals, entropy, memory(smoothed), memory(smoothed), memory(predicted), memory(predicted, torch.int32)
    )
    hidden = linear.hidden.to(linear.compute)
    plain = sums.mixed is sums.below is sums.at is linear.classifier_bias is None
    if plain and fold_product(hidden, linear.classifier, spec, classes, peaks, totals):
        return sums._replace(best=None)
    # Logits of 16 bits are made in float32: nothing that is reported is rounded on the way.
    dtype = torch.promote_types(linear.compute, torch.float32)
    rows, width = tile_shape(count, len(linear.weight), dtype.itemsize, linear.workspace)
    room = torch.empty(rows * width, dtype=dtype, device=device)
    for start in range(0, count, rows):
        some = hidden[start : start + rows]
        for first in range(0, len(linear.weight), width):
            part = slice(first, min(first + width, len(linear.weight)))
            tile = room[: len(some) * (part.stop - first)].view(len(some), -1)
            linear.write_logits(some, tile, part)
            _fold_tile(sums, tile, start, first, spec, classes, class_weight)
    return sums


def _fold_tile(
    sums: Sums, tile: Tensor, start: int, first: int, spec: LossSpec, classes: Tensor, class_weight: Tensor | None
) -> None:
    """Fold logits (R, W), each row contiguous, of rows [start, start + R) and classes [first, first + W)."""
    count, width = tile.shape
    launch(
        tile_kernel,
        count,
        (
            tile,
            tile.stride(0),
            width,
            start,
            first,
            classes,
            *sums[:5],
            sums.best,
            sums.at,
            class_weight,
            spec.softcap or 0.0,
            spec.logit_scale,
        ),
        {
            "CAPPED": spec.softcap is not None,
            "SCALED": spec.logit_scale != 1,
            "BLOCK": min(next_power_of_2(width), 1024),
        },
        num_warps=1,
    )
