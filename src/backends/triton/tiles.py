"""A pass over tiles of logits, or over none that are stored: see `xent.backends.triton.tile_kernels` and `product`."""

from typing import Any

import torch
from torch import Tensor

from xent.backends.triton.hopper import copyable
from xent.backends.triton.launch import cdiv, launch, next_power_of_2
from xent.backends.triton.product import launch_product, serves
from xent.backends.triton.tile_kernels import finish_kernel, tile_kernel

__all__ = ["TilePass"]


class TilePass:
    """Takes tiles of logits, classes in order, and gives what `TritonPass.forward` would without a gradient.

    `target_logits` (N,) take the place of the targets' raw logits, as in `TritonPass.forward`.
    """

    def __init__(self, facts: Any, results: Any, target_logits: Tensor) -> None:
        self.facts, self.results = facts, results
        count = len(facts.weight)
        self._target_logits = target_logits
        self._norm = results.norm if results.norm is not None else target_logits.new_empty(2, count)
        self.totals = target_logits.new_empty(count)
        self._best = None if results.predictions is None else target_logits.new_empty(count)
        self._mixed = None if results.entropy is None else target_logits.new_empty(count)
        smoothed = bool(facts.spec.label_smoothing)
        self._below = target_logits.new_empty(count) if smoothed else None
        self._seen = target_logits.new_empty(count) if smoothed else None
        self._class_weight = None if facts.class_weight is None else facts.class_weight.contiguous()

    def multiply(self, hidden: Tensor, classifier: Tensor, rounded: bool) -> bool:
        """Take all logits, those of hidden (N, D) and classifier (V, D), storing none; False where that is not served.

        `rounded`: as those are that will be made again. Of rows that are sure of a wrong class, p is then right to far
        more bits.
        """
        hidden = copyable(hidden)
        if not serves(hidden, classifier, self.facts):
            return False
        launch_product(hidden, classifier, self.facts, rounded, self._norm[0], self.totals)
        return True

    def add(self, tile: Tensor, start: int, first: int) -> None:
        """Take logits (R, W), each row contiguous, of rows [start, start + R) and classes [first, first + W)."""
        count, width = tile.shape
        spec, block = self.facts.spec, min(next_power_of_2(width), 1024)
        launch(
            tile_kernel,
            (count,),
            tile,
            tile.stride(0),
            width,
            start,
            first,
            self.facts.target,
            self._norm[0],
            self.totals,
            self._best,
            self.results.predictions,
            self._mixed,
            self._below,
            self._seen,
            self._class_weight,
            spec.softcap or 0.0,
            spec.logit_scale,
            CAPPED=spec.softcap is not None,
            SCALED=spec.logit_scale != 1,
            BLOCK=block,
            LANES=max(block // 8, 1),
            num_warps=1,
        )

    def finish(self) -> None:
        """Record the results."""
        facts, results, spec = self.facts, self.results, self.facts.spec
        count = len(facts.weight)
        launch(
            finish_kernel,
            (cdiv(count, 256),),
            count,
            self._norm[0],
            self.totals,
            self._mixed,
            self._below,
            self._seen,
            facts.target,
            self._target_logits,
            facts.weight,
            torch.zeros_like(facts.ignored) if facts.dead is None else facts.dead,
            self._class_weight,
            results.loss,
            None if results.norm is None else results.norm[1],
            results.lse,
            results.nll,
            results.entropy,
            results.z_term,
            1 - spec.label_smoothing,
            spec.label_smoothing / facts.vocabulary,
            spec.z_loss,
            spec.softcap or 0.0,
            spec.logit_scale,
            CAPPED=spec.softcap is not None,
            SCALED=spec.logit_scale != 1,
            Z_LOSS=spec.z_loss != 0,
            BLOCK=256,
        )
