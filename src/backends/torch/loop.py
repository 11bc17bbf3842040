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

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import STEPS, Part, Schedule, Setting, Steps, Upstream, columns, wide
from xent.backends.torch.memory import Rows, block_rows
from xent.backends.torch.portable.rows import Facts, activate, masked
from xent.backends.torch.sources import Computed, Loaded, Logits, Stored
from xent.core.call import Allowed, Call, Classes, Dense, Given, Probabilities, TopK, vocabulary_of
from xent.core.chunks import rows_per_chunk

__all__ = ["Asked", "asked_of", "backward", "forward", "leaves_of", "made_first", "setting_of"]

Asked = tuple[bool, ...]
"""Which gradients are asked for: those of the leaves (logits; or input, weight, bias), of class probabilities, and of
the logit scale."""


def leaves_of(call: Call) -> tuple[Any, ...]:
    """Return the values to which `Asked` refers."""
    source = call.source
    leaves = (source.logits,) if isinstance(source, Given) else (source.input, source.weight, source.bias)
    values = call.target.values if isinstance(call.target, Probabilities) else None
    return (*leaves, values, call.activation.logit_scale)


def asked_of(leaves: tuple[Any, ...]) -> Asked:
    """Return which gradients are asked for."""
    enabled = torch.is_grad_enabled()
    return tuple([enabled and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves])


def made_first(call: Call, needs: tuple[bool, ...]) -> bool:
    """Return whether the forward pass computes the gradients: for losses that are one number.

    Float16 logits are an exception: a gradient could underflow before the upstream gradient scales it.
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
    elif isinstance(target, Probabilities) and target.order is not None:
        count = target.order.shape[0]
    elif isinstance(target, Probabilities):  # hidden states may be this rank's tokens only
        count = math.prod(target.values.shape[:-1])
    else:
        count = math.prod(given.shape[:-1])
    compute = given.dtype if dtype is None else getattr(torch, dtype)
    firsts = upstream is None and made_first(call, needs)
    return Setting(call, count, size, first, width, compute, needs, given.device, firsts, upstream)


def forward(call: Call, asked: Asked, kernel: str, skips: bool, reuse: bool = False) -> list[Tensor]:
    """Compute a prepared call. Return the loss, the statistics, and then what the backward pass needs.

    These are the gradients, if they are made first, and in float16 their remaining factor; otherwise the saved sums.
    `reuse`: whether the gradient overwrites given logits. `skips`: whether ignored rows may be left out of matrix
    products, for which the host may have to wait.
    """
    setting = setting_of(call, _with_scale(call, asked) if asked[-1] else asked[:-2])
    steps, source, saved = _run(setting, kernel, skips, reuse)
    made = steps.results()
    if setting.made_first:
        gradients = source.gradients()
        made += [one for one, wanted in zip(gradients, asked, strict=False) if wanted and one is not None]
        if asked[-1]:
            made.append(_scale_gradient(setting, gradients))
        if setting.compute == torch.float16:
            made.append(made[0].new_ones(()) if steps.deferred is None else steps.deferred.clone())
    elif saved is not None:
        made.append(saved)
    return made


def backward(
    call: Call, asked: Asked, kernel: str, skips: bool, reuse: bool, saved: Tensor | None, upstream: Upstream
) -> list[Tensor | None]:
    """Return the gradients that are asked for, and None for the others."""
    needs = _with_scale(call, asked) if asked[-1] else asked[:-2]
    setting = setting_of(call, needs, upstream)
    made: list[Tensor | None] = [None] * len(needs)
    if any(needs):
        made = _run(setting, kernel, skips, reuse, saved)[1].gradients()
    of_scale = _scale_gradient(setting, made) if asked[-1] else None
    made = [one if wanted else None for one, wanted in zip(made, asked, strict=False)]
    return [*made, _probability_gradient(setting) if asked[-2] else None, of_scale]


def _run(
    setting: Setting, kernel: str, skips: bool, reuse: bool, saved: Tensor | None = None
) -> tuple[Steps, Stored, Tensor | None]:
    """Compute all rows with the steps of a backend: a forward pass, or a backward pass from the `saved` sums.

    Return the steps, which have the results, the source, which has the gradients, and the sums (K, N), if a forward
    pass saves them for the backward pass.
    """
    steps, call, forward = STEPS[kernel](setting), setting.call, setting.upstream is None
    kind = Stored if isinstance(call.source, Given) else Computed
    source = kind(setting, steps, setting.made_first or not forward, reuse)
    if forward and any(setting.needs) and not (setting.made_first or isinstance(call.target, (Dense, TopK))):
        saved = torch.zeros(len(columns(setting)), setting.count, dtype=wide(setting.compute), device=setting.device)
    again = not forward and steps.saves
    fused = steps.fuses and not again and not source.tiles
    schedule = Schedule(steps, setting, source.step, skips and source.skips)
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
    """Wait for the sums of a part, finish its rows, and compute its gradient if it is wanted."""
    arrived = sums if isinstance(sums, Tensor) else sums.wait()
    if isinstance(setting.call.target, Dense):
        steps.meet(arrived, loaded.part)
        arrived = _fold(setting, source, loaded, 2).wait()
    coefficients = steps.finish(arrived, loaded.part, source.wanted, saved)
    if source.wanted:
        source.differentiate(loaded, coefficients)
        source.add(loaded)


def _with_scale(call: Call, asked: Asked) -> Asked:
    """Return which gradients of the leaves are needed for that of the scale too."""
    if isinstance(call.source, Given):
        return (True,)
    return asked[0] or not asked[1], asked[1], call.source.bias is not None


def _scale_gradient(setting: Setting, gradients: list[Tensor | None]) -> Tensor:
    """Return the gradient of the scale, 0-d, in the dtype of sums.

    An element whose gradient is 0 adds 0, even if its value is infinite or NaN.
    """
    leaves = list(leaves_of(setting.call)[:-2])
    if len(leaves) == 3 and gradients[0] is not None:
        leaves[1] = None
    total = torch.zeros((), dtype=wide(setting.compute), device=setting.device)
    for gradient, values in zip(gradients, leaves, strict=True):
        if gradient is None or values is None or not gradient.numel():
            continue
        dtype, rows, places = wide(values.dtype), Rows(values), Rows(gradient)
        step = block_rows(gradient, dtype)
        for start in range(0, places.count, step):
            block, other = (one[start : min(start + step, one.count)].to(dtype) for one in (places, rows))
            total = total + (block * other).masked_fill_(block == 0, 0).sum()
    found: Tensor = total / setting.call.activation.logit_scale
    return found


def _probability_gradient(setting: Setting) -> Tensor:
    """Return the gradient of the target, contiguous, in the target's dtype."""
    target, options, facts = setting.call.target, setting.call.options, Facts(setting)
    assert isinstance(target, Probabilities)
    given = target.values
    grad = torch.zeros(given.shape, dtype=given.dtype, device=given.device)
    flat, class_weight = grad.view(-1, given.shape[-1]), 1.0 if facts.class_weight is None else facts.class_weight
    for start, z in _logits(setting):
        some = facts.rows(slice(start, start + len(z)))
        factor = masked(some.scale, some.excluded, 0)
        scales = factor[:, None] * (1 - options.label_smoothing) * class_weight
        if some.upstream.nll is not None:
            scales = scales + some.upstream.nll[:, None]
        if some.ignored is not None:
            scales = scales.masked_fill(some.ignored[:, None], 0)
        activate(z, some.activation)
        found = torch.log_softmax(z, -1).mul_(-scales).masked_fill_(scales == 0, 0).to(grad.dtype)
        if some.order is None:
            flat[some.index] = found
        else:
            flat.index_add_(0, some.order.clamp(min=0), found)
    return grad


def _logits(setting: Setting) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, logits (R, V) in the dtype of sums) of all rows; the caller may overwrite them."""
    source, acc, count = setting.call.source, wide(setting.compute), setting.count
    made, stored = Logits(source, setting), isinstance(source, Given)
    if isinstance(source, Given):
        step = block_rows(source.logits, acc)
    else:
        step = rows_per_chunk(count, max(setting.width, 1), acc.itemsize, source.workspace, setting.device.type, False)
    for start in range(0, count, step):
        part = Part(start, min(start + step, count))
        yield start, made.block(part, 0, part.stop - start).to(acc, copy=stored)
