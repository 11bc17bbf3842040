"""Launches of the kernels in `shard_land_kernels`, which merge the sums of all ranks."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts
from xent.backends.torch.job import Upstream
from xent.backends.torch.schedule import Part
from xent.backends.torch.sharded.layout import Layout
from xent.backends.torch.sharded.steps import Coefficients, Landing
from xent.backends.torch.sharded.sums import Slots
from xent.backends.triton.facts import bends, scales, strided
from xent.backends.triton.launch import cdiv, launch
from xent.backends.triton.shard_land_kernels import shard_again_kernel, shard_land_kernel

__all__ = ["ShardLanding", "slots"]

_SLOTS = ("below", "mixed", "squares", "deficit", "key")
_ROWS = 64  # rows of a program, with 2 warps: a part of 1024 rows uses 16 multiprocessors
_bounds: WeakKeyDictionary[Layout, Tensor] = WeakKeyDictionary()


class ShardLanding:
    """`land` and `again` for the rows of a call whose targets are class indices."""

    def __init__(self, facts: Facts, layout: Layout) -> None:
        assert facts.target is not None
        self._facts, self._layout = facts, layout
        self._target, self._weight, self._scale = (
            values.contiguous() for values in (facts.target, facts.weight, facts.scale)
        )
        self._dead = None if facts.dead is None else facts.dead.contiguous()
        spec, smoothing = facts.spec, facts.spec.label_smoothing
        self._numbers = (
            facts.vocabulary,
            1 - smoothing,
            smoothing / facts.vocabulary,
            spec.z_loss,
            *scales(spec, facts.bend),
        )
        self._constants = {"Z_LOSS": spec.z_loss != 0, **bends(spec, facts.bend), "BLOCK": _ROWS}

    def land(self, sums: Slots, landing: Landing) -> Coefficients | None:
        """See `xent.backends.torch.sharded.steps.Steps.land`."""
        facts, part, weights, results = self._facts, landing.part, landing.weights, landing.results
        values, count = sums.values, part.stop - part.start
        made = self._new_coefficients(count) if landing.wanted else None
        if count:
            launch(
                shard_land_kernel,
                cdiv(count, _ROWS),
                (
                    values,
                    values.stride(0),
                    len(values),
                    count,
                    self._bounds(),
                    None if weights is None else weights.of_ranks,
                    None if weights is None else weights.of_rows,
                    None if weights is None else weights.total,
                    part.rows,
                    part.start,
                    self._target,
                    self._weight,
                    self._scale,
                    self._dead,
                    results.loss,
                    results.lse,
                    results.nll,
                    results.entropy,
                    results.predictions,
                    results.log_sum_sq_probs,
                    results.mean_logit,
                    results.z_term,
                    *strided(landing.kept),
                    len(facts.weight),
                    made,
                    *self._numbers,
                ),
                slots(sums) | self._constants,
                num_warps=2,
            )
        return None if made is None else self._coefficients(made, part, None)

    def again(self, kept: Tensor, part: Part) -> Coefficients:
        """See `xent.backends.torch.sharded.steps.Steps.again`."""
        facts, count = self._facts, part.stop - part.start
        upstream = (facts.upstream or Upstream())[1:]
        made = self._new_coefficients(count)
        if count:
            launch(
                shard_again_kernel,
                cdiv(count, _ROWS),
                (
                    kept,
                    kept.stride(0),
                    len(facts.weight),
                    part.rows,
                    part.start,
                    count,
                    self._scale,
                    *(value for one in upstream for value in strided(one)),
                    made,
                    *self._numbers,
                ),
                {
                    "WEIGHED": facts.class_weight is not None,
                    "SMOOTHED": facts.spec.label_smoothing != 0,
                    **self._constants,
                },
                num_warps=2,
            )
        return self._coefficients(made, part, upstream[2])

    def _new_coefficients(self, count: int) -> Tensor:
        return torch.empty(6, count, dtype=torch.float32, device=self._scale.device)

    def _coefficients(self, made: Tensor, part: Part, of_entropy: Tensor | None) -> Coefficients:
        peak, log_sum, alpha, target, beta, delta = made.unbind()
        zero = None if self._dead is None else self._dead[part.start : part.stop]
        return Coefficients(
            peak,
            log_sum,
            alpha,
            None if of_entropy is None else beta,
            delta if self._facts.spec.label_smoothing else None,
            None,
            None,
            target,
            zero,
        )

    def _bounds(self) -> Tensor:
        """Return each rank's range of classes, (ranks, 2) int64 on the device. It is copied there once per layout."""
        found = _bounds.get(self._layout)
        if found is None or found.device != self._scale.device:
            found = torch.tensor(self._layout.ranges, dtype=torch.int64).to(self._scale.device)
            _bounds[self._layout] = found
        return found


def slots(sums: Slots) -> dict[str, Any]:
    """Return the kernels' constants: the slot of each sum, -1 if it is not needed."""
    return {name.upper(): sums.names.index(name) if name in sums else -1 for name in _SLOTS}
