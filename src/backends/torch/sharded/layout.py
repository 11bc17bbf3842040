"""The layout: which rank has which classes. Ranks exchange it once, check it alike, and cache it.

The data that ranks exchange (`Mine`), once per group and kind of call, determines the number and the sizes of a call's
collectives. Later calls of the same kind exchange nothing for the layout. The cache key has only this rank's own shard.
So if two vocabularies share a group, and have equal shards on some ranks but not on others, one must be named by
`size`. With XENT_CHECK_TARGETS=1 every call exchanges its layout.
"""

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from xent.backends.torch.environment import checks_targets
from xent.backends.torch.sharded.collectives import gather

__all__ = ["Layout", "Mine", "Refused", "find", "forget", "is_known", "refuse"]

_MOST = 1024
_WORDS = 48  # length of an error message, in words of eight bytes
_known: WeakKeyDictionary[Any, dict[Hashable, "Layout"]] = WeakKeyDictionary()


class Refused(ValueError):
    """An error that all ranks find from the same data, so that no rank has to be told."""


class Mine(NamedTuple):
    """One rank's description of its call."""

    rows: int
    """The number of classes of the shard, including padding."""
    first: int | None
    size: int | None
    kind: tuple[Any, ...]
    """Everything that determines the number of collectives and their sizes; equal on all ranks."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The shards of all ranks of a group."""

    group: Any
    rank: int
    rows: int
    """The number of classes of this rank's shard, including padding."""
    vocabulary: int
    """The number V of all classes."""
    ranges: tuple[tuple[int, int], ...]
    """Range [first, stop) of each rank's classes, without padding."""
    most: int
    """The largest number of classes on any rank."""

    @property
    def first(self) -> int:
        """Return this rank's first class."""
        return self.ranges[self.rank][0]

    @property
    def count(self) -> int:
        """Return the number of this rank's classes, without padding."""
        first, stop = self.ranges[self.rank]
        return stop - first

    def owners(self, target: Tensor) -> Tensor:
        """Return a mask (ranks, N) of the rank that has each target."""
        return torch.stack([(target >= first) & (target < stop) for first, stop in self.ranges])

    def on_ranks(self, values: list[float], like: Tensor) -> Tensor:
        """Return `values`, one per rank, as a tensor (ranks,) with the dtype and device of `like`."""
        return torch.tensor(values, dtype=torch.float64).to(like.device, like.dtype, non_blocking=True)


def is_known(group: Any) -> bool:
    """Return whether the ranks of a group have agreed on a layout before."""
    return group in _known


def find(group: Any, mine: Mine, shard: Tensor, target: Tensor) -> Layout:
    """Return the layout of a call, and exchange it if the call is new.

    The values of `shard` and `target` are read only then.
    """
    layouts = _known.get(group)
    found = None if layouts is None else layouts.get(mine)
    if found is not None and not checks_targets():
        return found
    if shard.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first call of its kind exchanges the layout of the vocabulary, which a CUDA graph cannot capture: "
            "make one call of the kind before the capture"
        )
    fingerprints = _fingerprint(mine, shard), _fingerprint_of_target(target)
    table = _exchange(group, mine, fingerprints, "", shard.device)
    found = _agree(group, table)
    layouts = _known.setdefault(group, {})
    if len(layouts) >= _MOST:
        layouts.clear()
    layouts[mine] = found
    return found


def forget() -> None:
    """Clear the cache. All ranks must call this."""
    _known.clear()


def refuse(group: Any, text: str, device: torch.device) -> None:
    """Tell the ranks that wait for a layout about an error on this rank."""
    _exchange(group, Mine(0, None, None, ()), (0, 0), text, device)


class _Received(NamedTuple):
    """The description of a call that was received from one rank."""

    rows: int
    first: int
    size: int
    kind: int
    fingerprint: int
    target: int
    text: str


def _exchange(
    group: Any, mine: Mine, fingerprints: tuple[int, int], text: str, device: torch.device
) -> list[_Received]:
    numbers = [
        mine.rows,
        -1 if mine.first is None else mine.first,
        -1 if mine.size is None else mine.size,
        _hashed(repr(mine.kind).encode()),
        *fingerprints,
    ]
    raw = text.encode(errors="replace")[: 8 * _WORDS].ljust(8 * _WORDS, b"\0")
    words = [int.from_bytes(raw[place : place + 8], "little", signed=True) for place in range(0, len(raw), 8)]
    sent = torch.tensor(numbers + words, dtype=torch.int64).to(device)
    said = []
    for row in gather(sent, group).land().tolist():
        spelt = b"".join(word.to_bytes(8, "little", signed=True) for word in row[len(numbers) :])
        rows, first, size, kind, of_shard, of_target = row[: len(numbers)]
        said.append(
            _Received(rows, first, size, kind, of_shard, of_target, spelt.rstrip(b"\0").decode(errors="replace"))
        )
    return said


def _hashed(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _fingerprint(mine: Mine, shard: Tensor) -> int:
    """Return a hash of a shard's values; 0 if the caller describes the shards."""
    if mine.first is not None or mine.size is not None or not shard.numel():
        return 0
    flat = shard.detach().reshape(-1) if shard.is_contiguous() else shard.detach()[..., -1].reshape(-1)
    some = flat[:: max(flat.numel() // 64, 1)][:64].double().cpu()
    if bool((some == some[0]).all()) or not bool(some.isfinite().all()):
        return 0  # fresh memory, or a classifier that begins with zeros
    return _hashed(some.numpy().tobytes()) or 1


def _fingerprint_of_target(target: Tensor) -> int:
    """Return a hash of the targets.

    It is 0 for class probabilities, of which each rank has its own classes, and if targets are compared one by one.
    """
    if target.is_floating_point() or checks_targets():
        return 0
    return _hashed(target.detach().to("cpu", torch.int64).contiguous().numpy().tobytes()) or 1


def _agree(group: Any, table: list[_Received]) -> Layout:
    """Return the layout that the ranks describe, or raise the same error on all of them."""
    for rank, said in enumerate(table):
        if said.text:
            raise Refused(f"this call did not begin, because of an error on rank {rank} of the group: {said.text}")
    one = table[0]
    for rank, said in enumerate(table):
        if said.kind != one.kind:
            raise Refused(
                f"all ranks must make the same call: rank {rank} differs from rank 0 in options, statistics, dtypes, "
                "the gradients asked for, the width of hidden states, shift or workspace"
            )
        if said.size != one.size:
            raise Refused(
                f"vocab_parallel.size must be the same on all ranks: it is {_named(one.size)} on rank 0 and "
                f"{_named(said.size)} on rank {rank}"
            )
        if (said.first < 0) != (one.first < 0):
            raise Refused(
                f"either all ranks name vocab_parallel.first or none: it is {_named(one.first)} on rank 0 and "
                f"{_named(said.first)} on rank {rank}"
            )
    for rank, said in enumerate(table):
        if 0 not in (said.target, one.target) and said.target != one.target:
            raise Refused(
                f"target must be the same on all ranks of the group, and that of rank {rank} differs from that of rank "
                "0. With data parallelism each rank has other tokens and the whole classifier: leave out "
                "vocab_parallel; where FSDP2 has the classifier in pieces, make the call in the forward of the module "
                "that holds it"
            )
    firsts = [said.first for said in table]
    if one.first < 0:
        firsts = [sum(said.rows for said in table[:rank]) for rank in range(len(table))]
    _refuse_whole(table)
    vocabulary = (
        one.size if one.size >= 0 else max(first + said.rows for first, said in zip(firsts, table, strict=True))
    )
    ranges = tuple(
        (min(first, vocabulary), min(first + said.rows, vocabulary)) for first, said in zip(firsts, table, strict=True)
    )
    _check_cover(ranges, vocabulary)
    rank = group.rank()
    most = max(stop - first for first, stop in ranges)
    return Layout(group, rank, table[rank].rows, vocabulary, ranges, most)


def _named(value: int) -> str:
    return "None" if value < 0 else str(value)


def _refuse_whole(table: list[_Received]) -> None:
    """Raise an error if every rank has all classes, which would count each class once per rank."""
    ranks, one = len(table), table[0]
    if ranks == 1:
        return
    if one.size > 0 > one.first and all(said.rows >= one.size for said in table):
        raise Refused(
            f"every rank has {one.rows} classes, and vocab_parallel.size is {one.size}: that is the whole vocabulary "
            f"on each of {ranks} ranks, and not its shards. Pass each rank its rows, or leave out vocab_parallel"
        )
    if one.fingerprint and all(said[:2] == one[:2] and said.fingerprint == one.fingerprint for said in table):
        raise Refused(
            f"all {ranks} ranks have the same {one.rows} classes with the same values: is that the whole vocabulary, "
            "or gathered logits, or shards that were drawn with one seed? Pass each rank its own shard; if these are "
            f"shards all the same, say so with xent.VocabParallel(group, size={ranks * one.rows})"
        )


def _check_cover(ranges: tuple[tuple[int, int], ...], vocabulary: int) -> None:
    """Raise an error if the ranges do not cover [0, V), each class once."""
    if vocabulary == 0:
        raise Refused("there must be at least one class, got empty shards on all ranks")
    stop, before = 0, None
    for rank, (first, end) in sorted(enumerate(ranges), key=lambda item: item[1]):
        if first == end:
            continue
        if first != stop:
            after = "" if before is None else f", after those of rank {before}"
            fault = "overlap" if first < stop else "leave a gap"
            raise Refused(
                f"the shards {fault}: rank {rank} has classes [{first}, {end}) and should have [{stop}, "
                f"{stop + end - first}){after}"
            )
        stop, before = end, rank
    if stop != vocabulary:
        raise Refused(
            f"the shards leave a gap: rank {before} has the last classes, up to {stop}, and should have those up to "
            f"vocab_parallel.size = {vocabulary}"
        )
