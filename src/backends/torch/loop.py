"""The one loop of a call: parts of rows, tiles of classes, shards, and the backward pass from saved sums.

| call | logits | gradients |
|---|---|---|
| mean, sum | whole rows, in parts | in the forward pass, kept for the backward pass |
| none, log-probabilities | tiles or whole rows | in the backward pass, from the saved sums |
| without gradients | tiles or whole rows | |

A vocabulary in shards adds a gather of each part's sums, which overlaps the next part's matrix product.

`forward` and `backward` are the two passes of a prepared call, for plain calls and for custom operations. They add two
gradients. The loss depends on raw logits z and their scale s only through the product s z, also with a softcap. With
g = dL/dz::

    dL/ds = (1/s) sum_ic g_ic z_ic

For logits z = h W^T + b the sum is sum(dL/dh * h) + sum(dL/db * b), or the same with W instead of h. These gradients
are computed anyway, or for this sum only.

The loss is linear in class probabilities q. With w, e and a as in `xent.cross_entropy`, the divisor D of the reduction,
and upstream gradients u of the loss and n of the statistic nll::

    dL/dq_ic = (u a_i / D (1-e) w_c + n_i) (-log p_ic)      exactly 0 if the first factor is 0

The z-loss and the divisor of "mean" do not depend on q. The steps do not compute this gradient. The backward pass of
such a call computes log p here, from the given logits, or from float32 logits of the hidden states.
"""

from collections.abc import Iterator
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import STEPS, Block, Loaded, Part, Schedule, Setting, Steps, Upstream, wide
from xent.backends.torch.memory import RowView, block_rows, gradient_like
from xent.backends.torch.plan import Plan, Requested, leaves_of
from xent.backends.torch.portable.facts import Facts, masked
from xent.backends.torch.portable.rows import activate
from xent.backends.torch.ranks import Ranks
from xent.backends.torch.shards.checks import mark_uncomputed
from xent.backends.torch.sources import Computed, Logits, Stored, at_once, in_one_part
from xent.core.call import Call, Dense, Given, Probabilities, TopK
from xent.core.chunks import rows_per_chunk

__all__ = ["backward", "forward"]


def forward(plan: Plan, call: Call, reuse: bool = False) -> list[Tensor]:
    """Compute a prepared call. Return the loss, the statistics, and then what the backward pass needs.

    These are the gradients, if they are made first, and in float16 their remaining factor; otherwise the saved sums.
    `reuse`: whether the gradient overwrites given logits.
    """
    setting, requested = plan.setting(call), plan.requested
    ranks = Ranks(setting, plan.kernel) if "rank" in plan.names else None
    steps, gradients, saved = _run(setting, plan, reuse, None, ranks)
    results = steps.results()
    if ranks is not None:
        results[plan.names.index("rank")] = ranks.result()
    if setting.forward_gradients:
        results += [gradient for gradient in compress(gradients, requested.leaves) if gradient is not None]
        if requested.scale:
            results.append(_scale_gradient(setting, gradients))
        if setting.compute == torch.float16:
            results.append(results[0].new_ones(()) if steps.deferred is None else steps.deferred.clone())
    elif saved is not None:
        results.append(saved)
    return results


def backward(
    plan: Plan, call: Call, requested: Requested, reuse: bool, saved: Tensor | None, upstream: Upstream
) -> list[Tensor | None]:
    """Return the requested gradients, and None for the others.

    `requested`: those of the plan, or of class probabilities alone.
    """
    setting, factor = plan.setting(call, upstream), None
    gradients: list[Tensor | None] = [None] * len(setting.needs)
    without_scale = setting
    if requested.scale and setting.compute == torch.float16:
        # The factor s is multiplied in later: with it, the terms of the scale's gradient could underflow.
        factor = call.activation.logit_scale
        if not isinstance(factor, Tensor):
            factor = torch.full((), factor, dtype=torch.float32, device=setting.device)
        divided = [None if gradient is None else gradient / factor for gradient in upstream]
        without_scale = setting._replace(upstream=Upstream(*divided))
    if any(requested.leaves) or requested.scale:
        gradients = _run(without_scale, plan, reuse, saved)[1]
    of_scale = _scale_gradient(setting, gradients) if requested.scale else None
    if factor is not None and of_scale is not None:
        of_scale *= factor
        for gradient in gradients:
            if gradient is not None:  # PyTorch would round a 0-d factor on an accelerator to float16 first
                torch.mul(gradient, factor.reshape(1), out=gradient)
    gradients = [gradient if needed else None for gradient, needed in zip(gradients, requested.leaves, strict=True)]
    return [*gradients, _probability_gradient(setting) if requested.probabilities else None, of_scale]


def _run(
    setting: Setting, plan: Plan, reuse: bool, saved: Tensor | None = None, ranks: Ranks | None = None
) -> tuple[Steps, list[Tensor | None], Tensor | None]:
    """Compute all rows with the steps of a backend: a forward pass, or a backward pass from the `saved` sums.

    Return the steps, which have the results, the gradients of the leaves, and the sums (K, N), if a forward pass saves
    them for the backward pass.
    """
    steps, call, forward = STEPS[plan.kernel](setting), setting.call, setting.upstream is None
    needs_gradient, is_stored = setting.forward_gradients or not forward, isinstance(call.source, Given)
    if forward and not needs_gradient and any(setting.needs) and not isinstance(call.target, (Dense, TopK)):
        saved = torch.zeros(len(setting.columns), setting.count, dtype=wide(setting.compute), device=setting.device)
        if call.shards is not None:
            mark_uncomputed(saved, setting.columns.index("range"), setting.vocabulary)
    if ranks is not None and isinstance(call.source, Given):
        ranks.add(Part(0, setting.count), call.source.logits[..., : setting.width])
    from_sums = not forward and steps.saves
    if steps.fuses and not (from_sums or isinstance(call.target, (Dense, TopK))):
        if is_stored:
            return steps, [_whole_rows(setting, steps, needs_gradient, reuse, saved)], saved
        if steps.computes_all and in_one_part(setting, steps):
            return steps, at_once(setting, steps), saved
    kind = Stored if isinstance(call.source, Given) else Computed
    source = kind(setting, steps, needs_gradient, reuse)
    fused = steps.fuses and not from_sums and not source.tiles
    schedule = Schedule(steps, setting, source.step, plan.skips and source.skips)
    source.start(schedule)
    waiting: tuple[Loaded, Any] | None = None
    block: Block | None
    for part in schedule:
        loaded = source.load(part)
        if ranks is not None and not is_stored:
            ranks.add(part, next(source.blocks(loaded)).logits)
        if fused:
            for block in source.blocks(loaded):
                steps.whole_rows(block, part, saved)
            block = None  # the source may free its logits
            source.add(loaded)
        elif from_sums:
            assert saved is not None
            sums = saved[:, part.indices].unsqueeze(0).contiguous()
            source.differentiate(loaded, steps.finish(sums, part, True, None))
            source.add(loaded)
        else:
            arriving = loaded, _fold(setting, source, loaded, len(setting.columns))
            if source.overlaps:
                waiting, arriving = arriving, waiting
            if arriving is not None:
                _finish(setting, steps, source, *arriving, saved)
    if waiting is not None:
        _finish(setting, steps, source, *waiting, saved)
    return steps, source.gradients(), saved


def _whole_rows(
    setting: Setting, steps: Steps, needs_gradient: bool, reuse: bool, saved: Tensor | None
) -> Tensor | None:
    """Compute the rows of given logits in one step. Return their gradient."""
    source: Any = setting.call.source
    logits = source.logits
    grad = None if not needs_gradient else logits if reuse else gradient_like(logits)
    if setting.count:
        steps.whole_rows(Block(logits, grad=grad), Part(0, setting.count), saved)
    return grad


def _fold(setting: Setting, source: Stored, loaded: Loaded, count: int) -> Any:
    """Fold the logits of a part, and start to gather its `count` sums over ranks."""
    shape = count, loaded.part.stop - loaded.part.start
    sums = torch.empty(shape, dtype=wide(setting.compute), device=setting.device)
    source.fold(loaded, sums)
    if setting.call.shards is None:
        return sums.unsqueeze(0)
    from xent.backends.torch.shards.collectives import gather

    return gather(sums, setting.call.shards.group)


def _finish(setting: Setting, steps: Steps, source: Stored, loaded: Loaded, sums: Any, saved: Tensor | None) -> None:
    """Wait for the sums of a part, finish its rows, and compute its gradient if one is needed."""
    arrived = sums if isinstance(sums, Tensor) else sums.wait()
    if isinstance(setting.call.target, Dense):
        steps.begin_second_fold(arrived, loaded.part)
        arrived = _fold(setting, source, loaded, 2).wait()
    coefficients = steps.finish(arrived, loaded.part, source.needs_gradient, saved)
    if source.needs_gradient:
        source.differentiate(loaded, coefficients)
        source.add(loaded)


def _scale_gradient(setting: Setting, gradients: list[Tensor | None]) -> Tensor:
    """Return the gradient of the scale, 0-d, in the dtype of sums.

    An element whose gradient is 0 adds 0, even if its value is infinite or NaN.
    """
    leaves = list(leaves_of(setting.call)[:-2])
    if len(leaves) == 3 and gradients[0] is not None:
        leaves[1] = None
    total = torch.zeros((), dtype=wide(setting.compute), device=setting.device)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        if gradient is None or leaf is None or not gradient.numel():
            continue
        dtype, rows, places = wide(leaf.dtype), RowView(leaf), RowView(gradient)
        step = block_rows(gradient, dtype)
        for start in range(0, places.count, step):
            block, other = (view[start : min(start + step, view.count)].to(dtype) for view in (places, rows))
            total = total + (block * other).masked_fill_(block == 0, 0).sum()
    of_scale: Tensor = total / setting.call.activation.logit_scale
    return of_scale


def _probability_gradient(setting: Setting) -> Tensor:
    """Return the gradient of the target, contiguous, in the target's dtype."""
    target, options, facts = setting.call.target, setting.call.options, Facts(setting)
    assert isinstance(target, Probabilities)
    probs = target.probs
    grad = torch.zeros(probs.shape, dtype=probs.dtype, device=probs.device)
    flat, class_weight = grad.view(-1, probs.shape[-1]), 1.0 if facts.class_weight is None else facts.class_weight
    for start, z in _logits(setting):
        row_facts = facts.rows(slice(start, start + len(z)))
        factor = masked(row_facts.scale, row_facts.excluded, 0)
        scales = factor[:, None] * (1 - options.label_smoothing) * class_weight
        if row_facts.upstream.nll is not None:
            scales = scales + row_facts.upstream.nll[:, None]
        if row_facts.ignored is not None:
            scales = scales.masked_fill(row_facts.ignored[:, None], 0)
        activate(z, row_facts.activation)
        of_block = torch.log_softmax(z, -1).mul_(-scales).masked_fill_(scales == 0, 0).to(grad.dtype)
        if row_facts.order is None:
            flat[row_facts.index] = of_block
        else:
            flat.index_add_(0, row_facts.order.clamp(min=0), of_block)
    return grad


def _logits(setting: Setting) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, logits (R, V) in the dtype of sums) of all rows; the caller may overwrite them."""
    source, acc, count = setting.call.source, wide(setting.compute), setting.count
    logits, stored = Logits(source, setting), isinstance(source, Given)
    if isinstance(source, Given):
        step = block_rows(source.logits, acc)
    else:
        step = rows_per_chunk(count, max(setting.width, 1), acc.itemsize, source.workspace, setting.device.type, False)
    for start in range(0, count, step):
        part = Part(start, min(start + step, count))
        yield start, logits.block(part, 0, part.stop - start).to(acc, copy=stored)
