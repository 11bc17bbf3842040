"""The k most probable classes of rows: chunks of rows, and in each row the blocks of classes with the largest maxima.

The k blocks with the largest maxima, the first among equals, have the k largest logits, the first among equals: each of
them has a logit that comes before those of any other block. Their maxima are found in the same way. So of a long row
little is sorted, whatever its logits are: no number of candidates depends on them, and the host waits for nothing.

With the largest x_0 of a row, over all ranks::

    log p_c = (x_c - x_0) - log sum_c exp(x_c - x_0)
"""

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.contract import LARGEST, Part, Setting, wide
from xent.backends.torch.memory import RowView, block_rows
from xent.backends.torch.plan import compute_of
from xent.backends.torch.portable.rows import activate
from xent.backends.torch.prepare import prepare, rows_of
from xent.backends.torch.sources import Logits
from xent.core.call import Activation, Call, Given, Largest, Shards, array_of, vocabulary_of
from xent.core.chunks import rows_per_chunk
from xent.core.validate import check_int

__all__ = ["top_k"]

_BLOCK = 32  # classes
_WORKSPACE = 512 * 2**20  # bytes, on accelerators
_CANDIDATE_BYTES = 32  # of a logit that PyTorch sorts, with its class
_ROWS_MULTIPLE = 256  # of a chunk: products compute tiles of as many rows
_MOST_CLASSES, _MOST_K = 2**20, 1024  # of kernels
_BLOCKS_OF_KERNELS = 16  # in a part of given logits, for which kernels need a fifteenth of its memory


def top_k(call: Call, kernel: str) -> list[Tensor]:
    """Return ids and log-probabilities (N, K) of a call with classes last, with the kernels of that backend."""
    count, device, acc = prod(rows_of(call)), array_of(call).device, wide(compute_of(call.source))
    if call.shards is not None:  # ranks with another k would send tensors of another size
        call = call._replace(shards=call.shards._replace(exchanges=True))
    source, target, activation, _, shards = call = prepare(call, ())
    assert isinstance(target, Largest)
    width, scale = vocabulary_of(source), activation.logit_scale
    first, size = (0, width) if shards is None else (shards.first or 0, shards.size or 0)
    width = max(min(width, size - first), 0)
    k = check_int("k", target.k, f"an int from 1 to the number of classes, {size},", 1, size)
    setting = Setting(call, count, size, first, width, compute_of(source), (), device, False, (), None)
    logits, most, sign = Logits(source, setting), min(k, width), (scale > 0) - (scale < 0)
    activation = activation._replace(logit_scale=abs(scale) or 1)
    selects = LARGEST.get(kernel, _largest) if width <= _MOST_CLASSES and k <= _MOST_K else _largest
    if not isinstance(source, Given):
        workspace = source.workspace or (None if device.type == "cpu" else _WORKSPACE)
        step = rows_per_chunk(count, max(width, 1), acc.itemsize, workspace, device.type)
        step -= step % _ROWS_MULTIPLE if _ROWS_MULTIPLE < step < count else 0
    else:
        step = block_rows(source.logits, source.logits.dtype)
        if selects is not _largest and sign == 1 and RowView(source.logits).are_direct:  # not copied
            step *= _BLOCKS_OF_KERNELS
    if selects is _largest:
        step = max(min(step, _WORKSPACE // (max(min(k * _BLOCK, width), 1) * _CANDIDATE_BYTES)), 1)
    parts = []
    for start in range(0, max(count, 1), step) if width else ():
        part = Part(start, min(start + step, count))
        z = logits.block(part, 0, part.stop - start)[:, :width]
        # With a scale of 0 all logits are equal, but x is NaN where they are infinite.
        parts.append(selects(z if sign == 1 else z * sign, most, activation))
    if not width:
        top = torch.empty(count, 0, dtype=acc, device=device)
        parts = [(top.long(), top, top.new_full((count,), -torch.inf))]
    ids, top, log_sum = (torch.cat(column) for column in zip(*parts, strict=True))
    if shards is not None:
        ids += first
        top, ids, log_sum = _of_all_ranks(top, ids, log_sum, k, activation, shards)
    activate(top, activation)
    return [ids, torch.where(top == -torch.inf, top, top - top[:, :1]) - log_sum[:, None]]


def _largest(z: Tensor, k: int, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """See `xent.backends.torch.contract.LARGEST`."""
    x = z.to(wide(z.dtype), copy=True)
    activate(x, activation)
    peak = x.amax(-1, keepdim=True)
    total = x.sub_(peak.masked_fill(peak == -torch.inf, 0)).exp_().sum(-1)
    places = _places(z, k)
    return places, z.gather(1, places).to(x.dtype), total.masked_fill_(total == 0, 1).log_()


def _places(z: Tensor, k: int) -> Tensor:
    """Return the places (R, k) of the k largest logits (R, C), the largest first, the first among equals."""
    count = z.shape[1]
    if count <= k * _BLOCK:
        return z.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    z = F.pad(z, (0, -count % _BLOCK), value=-torch.inf)
    blocks = _places(z.unflatten(1, (-1, _BLOCK)).amax(-1), k).sort(-1).values
    places = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=z.device)).flatten(1)
    return places.gather(1, z.gather(1, places).sort(dim=-1, descending=True, stable=True).indices[:, :k])


def _of_all_ranks(
    top: Tensor, ids: Tensor, log_sum: Tensor, k: int, activation: Activation, shards: Shards
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
