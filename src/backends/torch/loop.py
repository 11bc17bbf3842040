"""The one loop of a call: parts of rows, tiles of classes, shards, and the backward pass from saved sums.

| call | logits | gradients |
|---|---|---|
| mean, sum | whole rows, in parts | in the forward pass, kept for the backward pass |
| none, log-probabilities | tiles or whole rows | in the backward pass, from the saved sums |
| without gradients | tiles or whole rows | |

A vocabulary in shards adds a gather of each part's sums, which overlaps the next part's matrix product.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.contract import STEPS, Setting, Steps, Upstream, columns, wide
from xent.backends.torch.parts import Schedule
from xent.backends.torch.sources import Computed, Loaded, Stored, source_of
from xent.core.call import Allowed, Call, Classes, Dense, Given, Probabilities, TopK, vocabulary_of

__all__ = ["Outcome", "backward", "forward", "setting_of"]


class Outcome(NamedTuple):
    """What a forward pass returns."""

    results: list[Tensor]
    """The loss, then the statistics in the order of the options; those per row are (N,)."""
    gradients: list[Tensor | None]
    """One per leaf (logits; or input, weight, bias), for the reduced loss; None where not needed or not made yet."""
    deferred: Tensor | None
    """0-d: what the gradients still have to be multiplied by; None for 1."""
    saved: Tensor | None
    """(K, N): the sums for the backward pass."""


def setting_of(call: Call, needs: tuple[bool, ...], upstream: Upstream | None = None) -> Setting:
    """Return how a prepared call is run. Sizes may be symbolic."""
    source, target, shards = call.source, call.target, call.shards
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
        count = math.prod((source.logits if isinstance(source, Given) else source.input).shape[:-1])
    dtype = source.logits.dtype if isinstance(source, Given) else getattr(torch, source.dtype or "float32")
    return Setting(call, count, size, first, width, dtype, needs, upstream)


def _saved_columns(setting: Setting) -> int:
    """Return the number K of sums that a forward pass saves for the backward pass; 0 for none."""
    if not any(setting.needs) or setting.made_first or isinstance(setting.call.target, (Dense, TopK)):
        return 0
    return len(columns(setting))


def forward(call: Call, needs: tuple[bool, ...], kernel: str, reuse: bool = False, skips: bool = True) -> Outcome:
    """Compute a prepared call with the steps of a backend.

    `reuse`: whether the gradient overwrites given logits. `skips`: whether ignored rows may be left out of matrix
    products, for which the host may have to wait.
    """
    setting = setting_of(call, needs)
    steps = STEPS[kernel](setting)
    count = _saved_columns(setting)
    saved = torch.zeros(count, setting.count, dtype=wide(setting.compute), device=setting.device) if count else None
    source = source_of(setting, steps, setting.made_first, reuse)
    _run(setting, steps, source, saved, skips)
    return Outcome(steps.results(), source.gradients(), steps.deferred, saved)


def backward(
    call: Call,
    needs: tuple[bool, ...],
    kernel: str,
    saved: Tensor | None,
    upstream: Upstream,
    reuse: bool = False,
    skips: bool = True,
) -> list[Tensor | None]:
    """Return the gradients of the leaves for upstream gradients of the results, from the saved sums."""
    setting = setting_of(call, needs, upstream)
    steps = STEPS[kernel](setting)
    source = source_of(setting, steps, True, reuse)
    _run(setting, steps, source, saved, skips)
    return source.gradients()


def _run(setting: Setting, steps: Steps, source: Stored | Computed, saved: Tensor | None, skips: bool) -> None:
    """Compute all rows; in a forward pass record their results, and write the sums to `saved` if it is not None."""
    again = setting.upstream is not None and steps.saves
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
            arriving = _fold(setting, source, loaded, len(columns(setting)))
            if source.overlaps:
                waiting, arriving = (loaded, arriving), waiting
            else:
                arriving = loaded, arriving
            if arriving is not None:
                _finish(setting, steps, source, *arriving, saved)
    if waiting is not None:
        _finish(setting, steps, source, *waiting, saved)


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
