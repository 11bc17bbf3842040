"""Ranges: which rank has which classes, and errors that name the rank.

If every rank names `first` and `size`, nothing is sent. Otherwise ranks exchange their ranges, the number of their rows
and a checksum of these in every call, and the host waits for it. There is no cache, on which two ranks could disagree.
All ranks check the same table, and so they raise the same error.

The checksums that travel with the sums (`checks`) find the same mistakes later. On CPUs the ranks then make the
exchange, whose error says what differs.

An error on one rank is raised there at once. No collective is entered on the way, so that the other ranks wait until
the timeout of their group, as in PyTorch's own collectives.
"""

import os
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xent.backends.torch import private
from xent.backends.torch.shards.checks import compared, line_checks, row_checks
from xent.backends.torch.shards.collectives import gather, tokens_of
from xent.core.call import Call, Given, Product, Shards, array_of, describe, vocabulary_of
from xent.core.spec import BackendError, Group, VocabParallel

__all__ = ["group_of", "named", "ranges_of", "refuse_different"]

_SAMPLES = 16
_OF_DATA_PARALLELISM = (
    "With data parallelism each rank has its own tokens and needs the whole classifier: leave out vocab_parallel. "
    "Where FSDP2 has the classifier in pieces, write model.lm_head.unshard() before the loss, or call the loss in the "
    "forward of the module that holds the classifier"
)


def group_of(argument: Group) -> dist.ProcessGroup:
    """Return the process group of a `vocab_parallel` argument, or raise TypeError or ValueError."""
    group = argument.group if isinstance(argument, (VocabParallel, Shards)) else argument
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"vocab_parallel must be a DeviceMesh of one dimension, got one of {group.ndim}, "
                f"{group.mesh_dim_names or tuple(group.shape)}: pass the one that shards the vocabulary, mesh[name]"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "vocab_parallel must be a torch.distributed process group, a DeviceMesh of one dimension or a "
            f"xent.VocabParallel of one, got {describe(group)}"
        )
    return group


def ranges_of(call: Call, count: int, *kind: object) -> tuple[Shards, int]:
    """Return the shards of a prepared call of `count` rows with its process group, `first` <= `size` and `size`.

    The second value is the number of classes of this rank without padding.

    `kind`: what else must be equal on all ranks because it determines the collectives and their sizes, such as the
    leaves that need a gradient. With XENT_CHECK_TARGETS=1 all calls exchange their ranges.
    """
    assert call.shards is not None
    first, size, group = call.shards.first, call.shards.size, call.shards.group
    group = private.group_named(group) if isinstance(group, str) else group_of(group)
    shards = call.shards._replace(group=group)
    if isinstance(call.source, Product):
        tokens_of(shards, tuple(call.source.input.shape), count)  # raises an error before anything is sent
    if first is None or size is None or shards.exchanges or os.environ.get("XENT_CHECK_TARGETS") == "1":
        first, size = _agreed(call._replace(shards=shards), count, kind)
    first = min(first, size)
    return shards._replace(first=first, size=size), min(vocabulary_of(call.source), size - first)


def refuse_different(call: Call, count: int, *kind: object) -> NoReturn:
    """Raise the error for ranks that differ in the rows or the ranges of a prepared call. All ranks must call this."""
    _agreed(call, count, kind)
    raise ValueError("the checksums of the ranks differ, although their rows and the ranges of their classes do not")


def named(vocab_parallel: Group) -> AbstractContextManager[None]:
    """Return a context in which errors name this rank, as in "rank 1: ...", and keep their type.

    Raise TypeError or ValueError if the argument is no process group.
    """
    return nullcontext() if torch.compiler.is_compiling() else _named(group_of(vocab_parallel).rank())


@contextmanager
def _named(rank: int) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, IndexError, RuntimeError, BackendError) as error:
        name = f"rank {rank}: "
        if not str(error).startswith(name):
            error.args = (f"{name}{error}",)
        raise


class _Stated(NamedTuple):
    """What one rank stated about its shard."""

    rows: int
    first: int
    """-1 for None; the same for `size`."""
    size: int
    kind: int
    """A checksum of what must be equal on all ranks."""
    tokens: int
    """Their number."""
    check: int
    """A checksum of all tokens."""
    sample: list[int]


def _agreed(call: Call, count: int, kind: tuple[object, ...]) -> tuple[int, int]:
    """Return the first class of this rank and the number of all classes, or raise the same error on all ranks."""
    assert call.shards is not None
    group = call.shards.group
    table = _exchange(call, call.shards, count, kind)
    ranges = _agree(table, int(group.rank()))
    if any(stated.check != table[0].check for stated in table):
        parts = [_difference(name, array, group) for name, array in compared(call).items()]
        raise ValueError(f"{'; '.join(filter(None, parts))}. {_OF_DATA_PARALLELISM}")
    return ranges


def _exchange(call: Call, shards: Shards, count: int, kind: tuple[object, ...]) -> list[_Stated]:
    array, rows, ranks = array_of(call), vocabulary_of(call.source), shards.group.size()
    if array.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a vocabulary in shards without first= and size= exchanges the ranges of its shards in every call, which a "
            "CUDA graph cannot capture. Name both; for shards of equal size, without padding: "
            f"vocab_parallel=xent.VocabParallel(group, first={rows} * group.rank(), size={rows * ranks})"
        )
    first, size = (-1 if value is None else value for value in (shards.first, shards.size))
    text = repr((_form(call._replace(shards=None)), shards.axis, shards.reduces, kind))
    numbers = torch.tensor([rows, first, size, zlib.crc32(text.encode()), count]).to(array.device)
    check = line_checks(row_checks(call, count)[None])
    sample = _sample(array if isinstance(call.source, Given) else call.source.weight, first < 0 and size < 0)
    table = gather(torch.cat((numbers, check, sample)), shards.group).wait().tolist()
    return [_Stated._make([*row[:6], row[6:]]) for row in table]


def _form(value: Any, name: str = "") -> Any:
    """Return a part of a call with only the dtypes of tensors, and the widths of those that all ranks have."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape[-1] if name in ("input", "ids") else None
    if not isinstance(value, tuple):
        return value
    names = getattr(value, "_fields", [""] * len(value))
    return type(value).__name__, [_form(field, name) for name, field in zip(names, value, strict=True)]


def _sample(shard: Tensor, reads: bool) -> Tensor:
    """Return the bits (_SAMPLES,) int64 of some values of a shard; zeros if it may not be read (`reads`)."""
    places = torch.arange(_SAMPLES, device=shard.device)
    if not reads or not shard.numel():
        return places * 0
    flat = (shard.detach() if shard.is_contiguous() else shard.detach()[..., -1]).reshape(-1)
    sampled = flat[places * flat.numel() // _SAMPLES].float()
    return torch.where(sampled.isfinite().all(), sampled, 0).view(torch.int32).long()


def _agree(table: list[_Stated], rank: int) -> tuple[int, int]:
    """Return the first class of this rank and the number of all classes, or raise the same error on all ranks."""
    rank_0, ranks = table[0], len(table)
    if any(stated.tokens != rank_0.tokens for stated in table):
        counts = ", ".join(f"{stated.tokens} on rank {rank}" for rank, stated in enumerate(table))
        raise ValueError(f"the number of tokens differs between ranks: it is {counts}. {_OF_DATA_PARALLELISM}")
    for other, stated in enumerate(table):
        if stated.kind != rank_0.kind:
            raise ValueError(
                f"all ranks must make the same call: rank {other} differs from rank 0 in options, statistics, dtypes, "
                "the gradients asked for, the width of hidden states or workspace"
            )
        if stated.size != rank_0.size:
            raise ValueError(
                f"vocab_parallel.size must be the same on all ranks: it is {_text(rank_0.size)} on rank 0 and "
                f"{_text(stated.size)} on rank {other}"
            )
        if (stated.first < 0) != (rank_0.first < 0):
            raise ValueError(
                f"either all ranks name vocab_parallel.first or none: it is {_text(rank_0.first)} on rank 0 and "
                f"{_text(stated.first)} on rank {other}"
            )
    are_whole = rank_0.size > 0 and all(stated.rows >= rank_0.size and stated.first <= 0 for stated in table)
    are_alike = len(set(rank_0.sample)) > 1 and all(stated == rank_0 for stated in table)
    if ranks > 1 and (are_whole or are_alike):
        raise ValueError(
            f"all {ranks} ranks have the same {rank_0.rows} classes: is that the whole vocabulary, or gathered logits, "
            "or shards that were drawn with one seed? Pass each rank its own shard, or leave out vocab_parallel; if "
            f"these are shards all the same, say so with xent.VocabParallel(group, size={ranks * rank_0.rows})"
        )
    firsts = [stated.first for stated in table]
    if rank_0.first < 0:
        firsts = [sum(stated.rows for stated in table[:place]) for place in range(ranks)]
    stops = [first + stated.rows for first, stated in zip(firsts, table, strict=True)]
    size = max(stops) if rank_0.size < 0 else rank_0.size
    if size == 0:
        raise ValueError("there must be at least one class, got empty shards on all ranks")
    stop, before = 0, None
    for first, end, other in sorted(zip(firsts, stops, range(ranks), strict=True)):
        first, end = min(first, size), min(end, size)
        if first == end:
            continue
        if first != stop:
            after = "" if before is None else f", after those of rank {before}"
            raise ValueError(
                f"the shards {'overlap' if first < stop else 'leave a gap'}: rank {other} has classes [{first}, {end}) "
                f"and should have [{stop}, {stop + end - first}){after}"
            )
        stop, before = end, other
    if stop != size:
        raise ValueError(
            f"the shards leave a gap: rank {before} has the last classes, up to {stop}, and should have those up to "
            f"vocab_parallel.size = {size}"
        )
    return firsts[rank], size


def _text(value: int) -> str:
    return "None" if value < 0 else str(value)


def _difference(name: str, array: Tensor, group: dist.ProcessGroup) -> str:
    """Return in which ranks an array (N,) or (N, K) of the rows differs from that of rank 0; "" if in none."""
    shown = array.dim() == 1 and name != "support"
    whole = gather((array if shown else line_checks(array)).contiguous(), group).wait()
    bits = line_checks(whole.flatten()).view(whole.shape)
    differs = bits != bits[0]
    ranks = differs.any(-1).nonzero().flatten().tolist()
    if not ranks:
        return ""
    row = int(differs[ranks[0]].nonzero()[0])
    numbers = f": {whole[ranks[0], row].item()} instead of {whole[0, row].item()}" if shown else ""
    return f"{name} of rank {', '.join(map(str, ranks))} differs from that of rank 0, first in row {row}{numbers}"
