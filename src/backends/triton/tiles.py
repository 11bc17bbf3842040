"""A fold over tiles of logits that are computed and overwritten, for forward passes that need no logits later."""

from typing import NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.linear_call import Linear
from xent.backends.triton.facts import Facts
from xent.backends.triton.hopper.product import fold_product, serves
from xent.backends.triton.launch import launch, next_power_of_2
from xent.backends.triton.tile_kernels import tile_kernel
from xent.core.chunks import tile_shape

__all__ = ["Sums", "fold", "stores_no_logits"]


class Sums(NamedTuple):
    """The sums of N rows without their targets, see `tile_kernels`; each (N,), None if not needed."""

    peaks: Tensor
    totals: Tensor
    mixed: Tensor | None
    below: Tensor | None
    seen: Tensor | None
    best: Tensor | None
    at: Tensor | None
    squares: Tensor | None
    level: Tensor | None


def stores_no_logits(linear: Linear, facts: Facts) -> bool:
    """Return whether the products for Hopper GPUs compute the sums of rows and the gradients of their logits."""
    if facts.probabilities is not None or facts.support is not None or facts.spec.label_smoothing != 0:
        return False
    apart = linear.classifier_bias is not None or facts.bend is not None
    return not apart and serves(linear.classifier, facts.spec)


def fold(linear: Linear, facts: Facts, classes: Tensor) -> Sums:
    """Return the sums over all classes except each row's target, `classes` (N,) int32."""
    count, device, spec = len(classes), classes.device, facts.spec
    names = spec.stats

    def memory(wanted: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(count, dtype=dtype, device=device) if wanted else None

    smoothed, predicted = spec.label_smoothing != 0, "predictions" in names or "accuracy" in names
    peaks, totals = torch.empty(2, count, dtype=torch.float32, device=device)
    sums = Sums(
        peaks,
        totals,
        memory("entropy" in names),
        memory(smoothed),
        memory(smoothed),
        memory(predicted),
        memory(predicted, torch.int32),
        memory("log_sum_sq_probs" in names),
        memory("mean_logit" in names),
    )
    hidden = linear.hidden.to(linear.compute)
    found = sums
    # An exact call has the same bits whatever statistics it returns. Sums that the product lacks need a second pass.
    if stores_no_logits(linear, facts) and (spec.exact or all(memory is None for memory in sums[3:])):
        fold_product(hidden, linear.classifier, spec, classes, peaks, totals, sums.mixed, linear.workspace)
        if all(memory is None for memory in sums[3:]):
            return found
        other_peaks, other_totals = torch.empty(2, count, dtype=torch.float32, device=device)
        sums = sums._replace(peaks=other_peaks, totals=other_totals, mixed=None)
    # With 16-bit inputs, tiles are float32, so that no reported value is rounded to 16 bits on the way.
    dtype = torch.promote_types(linear.compute, torch.float32)
    rows, width = tile_shape(count, len(linear.weight), dtype.itemsize, linear.workspace)
    room = torch.empty(rows * width, dtype=dtype, device=device)
    for start in range(0, count, rows):
        some = hidden[start : start + rows]
        for first in range(0, len(linear.weight), width):
            part = slice(first, min(first + width, len(linear.weight)))
            tile = room[: len(some) * (part.stop - first)].view(len(some), -1)
            linear.write_logits(some, tile, part)
            _fold_tile(sums, tile, start, first, facts, classes)
    return found


def _fold_tile(sums: Sums, tile: Tensor, start: int, first: int, facts: Facts, classes: Tensor) -> None:
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
            *sums,
            facts.class_weight,
            *facts.scales,
            facts.count,
            facts.shift,
        ),
        {
            **facts.constants,
            "BLOCK": min(next_power_of_2(width), 1024),
        },
        num_warps=1,
    )
