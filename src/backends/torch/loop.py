"""The one loop of a call: parts of rows, tiles of classes, shards, and the backward pass from saved sums.

| call | logits | gradients |
|---|---|---|
| mean, sum | whole rows, in parts | in the forward pass, kept for the backward pass |
| none, log-probabilities | tiles or whole rows | in the backward pass, from the saved sums |
| without gradients | tiles or whole rows | |

A vocabulary in shards adds a gather of each part's sums, which overlaps the next part's matrix product.
"""

import math
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import STEPS, Schedule, Setting, Steps, Upstream, columns, wide
from xent.backends.torch.sources import Computed, Loaded, Stored, source_of
from xent.core.call import Allowed, Call, Classes, Dense, Given, Probabilities, TopK, vocabulary_of

__all__ = ["made_first", "run", "setting_of"]


def made_first(call: Call, needs: tuple[bool, ...]) -> bool:
    """Return whether the forward pass computes the gradients: for losses that are one number.

    Not those of float16 logits, in which a gradient could underflow before the upstream gradient scales it.
    """
    source = call.source
    if call.options.reduction == "none" or not any(needs):
        return False
    return not isinstance(source, Given) or source.logits.dtype != torch.float16


def setting_of(call: Call, needs: tuple[bool, ...], upstream: Upstream | None = None) -> Setting:
    """Return how a prepared call is run. Sizes may be symbolic."""
    source, target, shards = call.source, call.target, call.shards
    given, dtype = (source.logits, None) if isinstance(source, Given) else (source.input, source.dtype)
    here = vocabulary_of(source)
    first, size = (0, here) if shards is None else (shards.first, shards.size)
    assert first is not None
    assert size is not None
    width = here if shards is None else max(min(first + here, size) - min(first, size), 0)
    if isinstance(target, (Classes, Allowed)):
        count = target.ids.shape[0]
    elif isinstance(target, Probabilities):
        count = math.prod(target.values.shape[:-1]) if target.order is None else target.order.shape[0]
    else:
        count = math.prod(given.shape[:-1])
    compute = given.dtype if dtype is None else getattr(torch, dtype)
    firsts = upstream is None and made_first(call, needs)
    return Setting(call, count, size, first, width, compute, needs, given.device, firsts, upstream)


def run(
    setting: Setting, kernel: str, skips: bool, reuse: bool, saved: Tensor | None = None
) -> tuple[Steps, Stored | Computed, Tensor | None]:
    """Compute all rows with the steps of a backend: a forward pass, or a backward pass from the `saved` sums.

    Return the steps, which have the results, the source, which has the gradients, and the sums (K, N), if a forward
    pass saves them for the backward pass. `reuse`: whether the gradient overwrites given logits. `skips`: whether
    ignored rows may be left out of matrix products, for which the host may have to wait.
    """
    steps, call, forward = STEPS[kernel](setting), setting.call, setting.upstream is None
    source = source_of(setting, steps, setting.made_first or not forward, reuse)
    if forward and any(setting.needs) and not (setting.made_first or isinstance(call.target, (Dense, TopK))):
        saved = torch.zeros(len(columns(setting)), setting.count, dtype=wide(setting.compute), device=setting.device)
    again = not forward and steps.saves
    fused = steps.fuses and not again and not source.tiles
    schedule = Schedule(steps, setting.count, source.step, skips and source.skips)
    source.start(schedule)
    waiting: tuple[Loaded, Any] | None = None
    for part in schedule:
        loaded = source.load(part)
        if fused:
            for block in source.blocks(loaded):
                steps.whole_rows(block, part, saved)
            source.add(loaded)
        elif again:
            assert saved is not None
            sums = saved[:, part.indices].unsqueeze(0).contiguous()
            source.differentiate(loaded, steps.finish(sums, part, True, None))
            source.add(loaded)
        else:
            arriving = loaded, _fold(setting, source, loaded, len(columns(setting)))
            if source.overlaps:
                waiting, arriving = arriving, waiting
            if arriving is not None:
                _finish(setting, steps, source, *arriving, saved)
    if waiting is not None:
        _finish(setting, steps, source, *waiting, saved)
    return steps, source, saved


def _fold(setting: Setting, source: Stored | Computed, loaded: Loaded, count: int) -> Any:
    """Fold the logits of a part, and start to gather its `count` sums over ranks."""
    shape = count, loaded.part.stop - loaded.part.start
    sums = torch.empty(shape, dtype=wide(setting.compute), device=setting.device)
    source.fold(loaded, sums)
    if setting.call.shards is None:
        return sums.unsqueeze(0)
    from xent.backends.torch.shards.collectives import gather

    return gather(sums, setting.call.shards.group)


def _finish(
    setting: Setting, steps: Steps, source: Stored | Computed, loaded: Loaded, sums: Any, saved: Tensor | None
) -> None:
    """Wait for the sums of a part, finish its rows, and compute its gradient if it is wanted."""
    landed = sums if isinstance(sums, Tensor) else sums.land()
    if isinstance(setting.call.target, Dense):
        steps.meet(landed)
        landed = _fold(setting, source, loaded, 2).land()
    coefficients = steps.finish(landed, loaded.part, source.wanted, saved)
    if source.wanted:
        source.differentiate(loaded, coefficients)
        source.add(loaded)
