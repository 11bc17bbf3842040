"""The steps for one rank's classes: launches of the kernels in `shard_kernels`.

Class probabilities, rows with a support and ranks without classes use the steps in PyTorch operations.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.job import Taken
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.schedule import Part
from xent.backends.torch.sharded.plain import PlainSteps
from xent.backends.torch.sharded.steps import STEPS, Coefficients, Shard, Steps
from xent.backends.torch.sharded.sums import Slots
from xent.backends.triton.facts import bends, is_quick, scales
from xent.backends.triton.geometry import Geometry, geometry, in_blocks
from xent.backends.triton.launch import cdiv, launch, next_power_of_2
from xent.backends.triton.shard_kernels import shard_fold_kernel, shard_gradient_kernel
from xent.backends.triton.shard_landing import ShardLanding, slots
from xent.backends.triton.shard_take_kernel import shard_take_kernel

__all__ = ["ShardSteps"]

# Bytes of a block, and of the part of a warp. Four programs of the fold fit on a multiprocessor, and the gradient has
# four vectors per thread, like the gradient of whole rows. Not measured.
_OF_FOLD, _OF_GRADIENT = (8 * 1024, 1024), (16 * 1024, 2048)


class ShardSteps:
    """See `xent.backends.torch.sharded.steps.Steps`."""

    def __init__(self, shard: Shard) -> None:
        facts = shard.facts
        assert shard.local is not None
        landing = ShardLanding(facts, shard.layout)
        self.land, self.again = landing.land, landing.again
        self._shard, self._spec, self._local = shard, facts.spec, shard.local
        self._dead = None if facts.dead is None else facts.dead.contiguous()
        self._weight = None if facts.class_weight is None else facts.class_weight.contiguous()
        self._numbers, self._bends = scales(self._spec, facts.bend), bends(self._spec, facts.bend)

    def take(self, linear: Linear, part: Part) -> Taken:
        """Gather the hidden states in one launch. Rows without a gradient are 0, unless there are statistics."""
        dead, count = self._dead, part.stop - part.start
        rounded = linear.compute.itemsize == 2 and self._shard.layout.count > 0
        if not count or (dead is None and not rounded):
            return PlainSteps(self._shard).take(linear, part)
        source, weight, bias = linear.hidden, linear.classifier, linear.classifier_bias
        taken = torch.empty(count, source.shape[1], dtype=linear.compute, device=source.device)
        found = torch.empty(count, dtype=torch.float32, device=source.device) if rounded else None
        launch(
            shard_take_kernel,
            count,
            (
                source,
                *source.stride(),
                weight,
                *weight.stride(),
                bias,
                0 if bias is None else bias.stride(0),
                taken,
                found,
                part.rows,
                part.start,
                self._local,
                dead,
                self._shard.layout.count,
                source.shape[1],
            ),
            {"BLOCK": min(next_power_of_2(max(source.shape[1], 1)), 2048)},
            num_warps=4,
        )
        if dead is None or not self._spec.stats:
            return Taken(taken, taken, found)
        hidden = source[part.indices]
        return Taken(hidden.to(linear.compute), taken, found)

    def fold(self, logits: Tensor, start: int, sums: Slots, target_logits: Tensor | None) -> None:
        """Write the sums in one launch, with one program per row."""
        rows, classes = logits.shape
        if not rows:
            return
        if not classes:
            PlainSteps(self._shard).fold(logits, start, sums, target_logits)
            return
        place = geometry(logits, None)
        assert place is not None
        block, warps = _block(classes, place, logits.itemsize, *_OF_FOLD)
        launch(
            shard_fold_kernel,
            rows,
            (
                logits,
                place.logits[2],
                place.skew,
                sums.values,
                sums.values.stride(0),
                self._local,
                self._weight,
                target_logits,
                start,
                len(self._local),
                self._shard.layout.first,
                classes,
                *self._numbers,
            ),
            {
                **slots(sums),
                **self._constants(place, logits),
                **in_blocks(classes, place, block, 1, 1, {}).constants(),
            },
            num_warps=warps,
            **place.options(),
        )

    def gradient(self, logits: Tensor, start: int, coefficients: Coefficients, grad: Tensor) -> None:
        """Write the gradient in one launch, with one program per block of a row."""
        rows, classes = logits.shape
        if not rows or not classes:
            return
        place, made = geometry(logits, grad), coefficients
        assert place is not None
        block, warps = _block(classes, place, logits.itemsize, *_OF_GRADIENT)
        spare = place.vector - 1 if place.skewed else 0
        numbers = (made.peak, made.log_sum, made.alpha, made.beta, made.delta, made.target, made.zero)
        launch(
            shard_gradient_kernel,
            rows * cdiv(classes + spare, block),
            (
                logits,
                place.logits[2],
                place.skew,
                grad,
                place.grad[2],
                *(None if one is None else one.contiguous() for one in numbers),
                self._local,
                self._weight,
                start,
                len(self._local),
                classes,
                *self._numbers,
            ),
            {**self._constants(place, logits), "BLOCK": block},
            num_warps=warps,
        )

    def _constants(self, place: Geometry, logits: Tensor) -> dict[str, Any]:
        """Return the constants that both kernels have."""
        facts = self._shard.facts
        return {
            "SKEWED": place.skewed,
            "RAGGED": place.ragged,
            "VECTOR": place.vector,
            "QUICK": is_quick(self._spec, facts.bend, facts.vocabulary, logits.itemsize == 2),
            **self._bends,
        }


def _block(classes: int, place: Geometry, itemsize: int, most: int, of_warp: int) -> tuple[int, int]:
    """Return (elements of a block, number of warps)."""
    block = max(min(next_power_of_2(classes), most // itemsize), 2 * place.vector)
    return block, max(min(block * itemsize // of_warp, 8), 1)


def _start(shard: Shard) -> Steps:
    facts = shard.facts
    return PlainSteps(shard) if facts.probabilities is not None or facts.support is not None else ShardSteps(shard)


STEPS["triton"] = _start
