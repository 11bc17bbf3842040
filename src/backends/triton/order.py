"""Puts the rows that are computed first, with all that is known about them, in one launch.

Programs take blocks of rows. Each of them counts all rows to know where its own begin.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from xent.backends.torch import steps as plain
from xent.backends.torch.facts import Facts
from xent.backends.triton.launch import cdiv, launch

__all__ = ["computed_first"]

_COUNTED = 8192  # rows at a time
_BLOCK = 1024
_PROGRAMS = 64  # at most
_WARPS = 8


@triton.jit(do_not_specialize=["count"])
def _order_kernel(
    idle,  # (N,) bool, like all of the next five
    target,
    weight,
    scale,
    ignored,
    dead,
    invalid,
    order,  # results: (N,) int64, then the same in that order
    ordered_target,
    ordered_weight,
    ordered_scale,
    ordered_ignored,
    ordered_dead,
    ordered_invalid,
    number,  # () int64
    count,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for block in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        before = tl.zeros([COUNTED], tl.int32)
        everywhere = tl.zeros([COUNTED], tl.int32)
        for first in range(0, count, COUNTED):
            rows = first + tl.arange(0, COUNTED)
            computed = (tl.load(idle + rows, mask=rows < count, other=1) == 0).to(tl.int32)
            before += tl.where(rows < block, computed, 0)
            everywhere += computed
        total = tl.sum(everywhere, 0)
        row = block + tl.arange(0, BLOCK)
        inside = row < count
        computed = (tl.load(idle + row, mask=inside, other=1) == 0).to(tl.int32)
        computed_before = tl.sum(before, 0) + tl.cumsum(computed, 0) - computed
        place = tl.where(computed != 0, computed_before, total + row - computed_before)
        tl.store(order + place, row.to(tl.int64), mask=inside)
        tl.store(ordered_target + place, tl.load(target + row, mask=inside), mask=inside)
        tl.store(ordered_weight + place, tl.load(weight + row, mask=inside), mask=inside)
        tl.store(ordered_scale + place, tl.load(scale + row, mask=inside), mask=inside)
        tl.store(ordered_ignored + place, tl.load(ignored + row, mask=inside), mask=inside)
        tl.store(ordered_dead + place, tl.load(dead + row, mask=inside), mask=inside)
        tl.store(ordered_invalid + place, tl.load(invalid + row, mask=inside), mask=inside)
        if block == 0:
            tl.store(number, total.to(tl.int64))


def computed_first(facts: Facts) -> tuple[Tensor, Tensor, Facts]:
    """Return the order, how many rows are computed, and the facts: see `xent.backends.torch.steps.computed_first`."""
    if facts.target is None or facts.dead is None or facts.invalid is None:
        return plain.computed_first(facts)
    known = (facts.target, facts.weight, facts.scale, facts.ignored, facts.dead, facts.invalid)
    order, number = torch.empty_like(facts.target), facts.target.new_empty(())
    target, weight, scale, ignored, dead, invalid = ordered = [torch.empty_like(values) for values in known]
    programs = min(cdiv(len(order), _BLOCK), _PROGRAMS)
    launch(
        _order_kernel,
        (programs,),
        facts.idle,
        *known,
        order,
        *ordered,
        number,
        len(order),
        COUNTED=_COUNTED,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    found = replace(facts, target=target, weight=weight, scale=scale, ignored=ignored, dead=dead, invalid=invalid)
    return order, number, found
