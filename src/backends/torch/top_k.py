"""The k most probable classes of rows: chunks of rows, and in each row the blocks of classes with the largest maxima.

The k blocks with the largest maxima, the first among equals, have the k largest logits, the first among equals: each of
them has a logit that comes before those of any other block. Their maxima are found in the same way. So of a long row
little is sorted, whatever its logits are: no number of candidates depends on them, and the host waits for nothing.

A logit here is `ordered`: -z if the scale is negative. With the largest x_0 of a row, over all ranks::

    log p_c = (x_c - x_0) - log sum_c exp(x_c - x_0)
"""

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.contract import LARGEST, Part, Setting, wide
from xent.backends.torch.memory import Rows, block_rows
from xent.backends.torch.plan import compute_of
from xent.backends.torch.portable.rows import activate, ordered
from xent.backends.torch.prepare import prepare, rows_of
from xent.backends.torch.sources import Logits
from xent.core.call import Activation, Call, Given, Largest, array_of, vocabulary_of
from xent.core.chunks import rows_per_chunk
from xent.core.validate import check_int

__all__ = ["BLOCK", "largest", "top_k"]

BLOCK = 32
"""The classes of a block."""
_WORKSPACE = 512 * 2**20  # bytes, on accelerators
_CANDIDATE_BYTES = 32  # of a logit that PyTorch sorts, with its class
_BLOCKS_OF_KERNELS = 8  # in a chunk of given logits that kernels read without a copy


def top_k(call: Call, kernel: str) -> list[Tensor]:
    """Return ids and log-probabilities (N, K) of an aligned call, with the kernels of that backend."""
    count, device, acc = prod(rows_of(call)), array_of(call).device, wide(compute_of(call.source))
    if call.shards is not None:  # ranks with another k would send tensors of another size
        call = call._replace(shards=call.shards._replace(exchanges=True))
    source, target, activation, _, shards = call = prepare(call, ())
    assert isinstance(target, Largest)
    width = vocabulary_of(source)
    first, size = (0, width) if shards is None else (shards.first or 0, shards.size or 0)
    width = max(min(width, size - first), 0)
    k = check_int("k", target.k, f"an int from 1 to the number of classes, {size},", 1, size)
    setting = Setting(call, count, size, first, width, compute_of(source), (), device, False, (), None)
    logits, scale = Logits(source, setting), activation.logit_scale
    activation = activation._replace(logit_scale=abs(scale))
    selects = LARGEST.get(kernel, _largest)
    if isinstance(source, Given):
        step = block_rows(source.logits, source.logits.dtype)
        if selects is not _largest and scale > 0 and Rows(source.logits).are_direct:
            step *= _BLOCKS_OF_KERNELS
    else:
        workspace = source.workspace or (None if device.type == "cpu" else _WORKSPACE)
        step = rows_per_chunk(count, max(width, 1), acc.itemsize, workspace, device.type)
    step = max(min(step, _WORKSPACE // (min(k * BLOCK, max(width, 1)) * _CANDIDATE_BYTES)), 1)
    top = torch.empty(count, min(k, width), dtype=acc, device=device)
    ids, sums = torch.empty_like(top, dtype=torch.int64), list[Tensor]()
    for start in range(0, count if width else 0, step):
        rows = slice(start, min(start + step, count))
        z = ordered(logits.block(Part(start, rows.stop), 0, rows.stop - start)[:, :width], scale)
        places, of_rows = selects(z, top.shape[1], activation)
        ids[rows], top[rows] = places, z.gather(1, places)
        sums.append(of_rows)
    top, order = top.sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order) + first
    log_sum = _log_sum(torch.cat(sums)) if sums else top.new_full((count,), -torch.inf)
    if shards is not None:
        top, ids, log_sum = _of_all_ranks(top, ids, log_sum, k, activation, shards)
    activate(top, activation)
    return [ids, torch.where(top == -torch.inf, top, top - top[:, :1]) - log_sum[:, None]]


def _largest(z: Tensor, k: int, activation: Activation) -> tuple[Tensor, Tensor]:
    """See `xent.backends.torch.contract.LARGEST`."""
    x = z.to(wide(z.dtype), copy=True)
    activate(x, activation)
    peak = x.amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == -torch.inf, 0)
    return largest(z, k), torch.stack((peak, x.sub_(peak).exp_().sum(-1, keepdim=True)), -1)


def _log_sum(sums: Tensor) -> Tensor:
    """Return log sum_c exp(x_c - max x) of each row, 0 for a sum of 0, from the sums (R, P, 2) of parts."""
    peaks, totals = sums.unbind(-1)
    peak = peaks.masked_fill(totals == 0, -torch.inf).amax(-1, keepdim=True)
    total = torch.where(totals == 0, 0, totals * (peaks - peak).exp()).sum(-1)
    return total.masked_fill_(total == 0, 1).log_()


def largest(z: Tensor, k: int, maxima: Tensor | None = None) -> Tensor:
    """Return the places (R, k) of the k largest logits (R, C), the largest first, the first among equals.

    `maxima`: those of blocks, or None.
    """
    count = z.shape[1]
    if count <= k * BLOCK:
        return z.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    if maxima is None:
        whole = count - count % BLOCK
        maxima = z[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1)
        if whole < count:
            maxima = torch.cat((maxima, z[:, whole:].amax(-1, keepdim=True)), 1)
    blocks = largest(maxima, k).sort(-1).values
    places = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=z.device)).flatten(1)
    candidates = z.gather(1, places.clamp(max=count - 1)).masked_fill_(places >= count, -torch.inf)
    return places.gather(1, candidates.sort(dim=-1, descending=True, stable=True).indices[:, :k])


def _of_all_ranks(
    top: Tensor, ids: Tensor, log_sum: Tensor, k: int, activation: Activation, shards: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the largest logits of ranks, their classes, and the sums relative to their largest x."""
    from xent.backends.torch.shards.collectives import gather  # needs torch.distributed

    missing = 0, k - top.shape[1]
    padded = F.pad(top, missing, value=-torch.inf), log_sum[:, None]
    sent = gather(torch.cat(padded, 1), shards.group).wait()
    classes = gather(F.pad(ids, missing, value=shards.size), shards.group).wait()  # after all others
    ids, places = classes.movedim(0, 1).flatten(1).sort(-1)
    top = sent[..., :k].movedim(0, 1).flatten(1).gather(1, places)
    top, places = (sorted_[:, :k] for sorted_ in top.sort(dim=-1, descending=True, stable=True))
    peaks, peak = sent[..., 0].clone(), top[:, 0].clone()
    for x in (peaks.view(-1), peak):
        activate(x, activation)
    sums = torch.where(peaks == -torch.inf, peaks, peaks - peak) + sent[..., k]
    log_sum = sums.logsumexp(0)
    return top, ids.gather(1, places), log_sum.masked_fill(log_sum == -torch.inf, 0)
