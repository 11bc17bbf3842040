"""Checksums by which ranks see that they have different rows, or classes that do not tile the vocabulary.

Each rank sends two integers per row with its sums: a checksum of what the row is computed from and what must be equal
on all ranks (`row_checks`), and a number of its classes (`range_check`). Arrays in shards, such as the rank's logits,
are in none of them. Floats are compared by their bits, so that NaN equals itself. Integer sums do not depend on the
order of additions.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.memory import block_rows
from xent.core.call import Allowed, Call, Classes, Dense, Probabilities, Product, TopK, array_of

__all__ = ["compared", "line_checks", "mark_uncomputed", "range_check", "row_checks"]

_MULTIPLIER = -7046029254386353131  # odd, 2^64 divided by the golden ratio, as int64
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def compared(call: Call) -> dict[str, Tensor]:
    """Return the arrays of a prepared call that must be equal on all ranks, by name: (N,) or (N, K) each.

    "support" is a checksum of the classes of each row. Hidden states that are gathered are equal by construction.
    """
    source, target, activation, options, shards = call
    arrays: dict[str, Any] = {}
    if isinstance(source, Product) and (shards is None or shards.axis is None):
        arrays["input"] = _rows(source.input)
    if isinstance(target, (Classes, Allowed)):
        arrays["target"] = target.ids
    if isinstance(target, Allowed):
        arrays["support"] = _of_support(target)
    elif isinstance(target, TopK):
        arrays |= {"teacher.ids": target.ids, "teacher.log_probs": target.log_probs}
    elif isinstance(target, Dense) and isinstance(target.source, Product):
        arrays["teacher.input"] = _rows(target.source.input)
    arrays |= {"sample_weight": options.sample_weight, "temperature": activation.temperature}
    return {name: array.detach() for name, array in arrays.items() if array is not None}


def row_checks(call: Call, count: int) -> Tensor:
    """Return a checksum (N,) int64 of each of the `count` rows of a prepared call.

    Ignored rows have results that depend on nothing but that they are ignored.
    """
    checks, ignored = torch.arange(count, device=array_of(call).device), _ignored(call)
    for name, array in compared(call).items():
        line = line_checks(array)
        if ignored is not None and name not in ("target", "sample_weight"):
            line = line.masked_fill(ignored, 0)
        checks = checks * _MULTIPLIER + line
    return checks


def line_checks(array: Tensor) -> Tensor:
    """Return a checksum (N,) int64 of the bits of each row of an array (N,) or (N, K)."""
    bits = array.view(_INTEGERS[array.itemsize]) if array.is_floating_point() else array.to(torch.int64)
    if bits.dim() == 1:
        return bits.to(torch.int64)
    factors = _mixed(torch.arange(1, bits.shape[1] + 1, device=bits.device)).bitwise_right_shift_(32).to(torch.int32)
    factors.bitwise_or_(1)
    step = block_rows(bits, factors.dtype)
    parts = [(bits[start : start + step] * factors).sum(-1) for start in range(0, max(len(bits), 1), step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ignored(call: Call) -> Tensor | None:
    """Return which rows (N,) have no results; None if all have."""
    target, options = call.target, call.options
    if isinstance(target, (Classes, Allowed)):
        ignored: Tensor = target.ids == options.ignore_index
        return ignored
    if isinstance(target, Probabilities):
        return None if target.order is None else target.order < 0
    return None if options.sample_weight is None else options.sample_weight == 0


def _rows(hidden: Tensor) -> Tensor:
    """Return hidden states (..., D) as (N, D)."""
    return hidden.flatten(0, -2) if hidden.dim() > 1 else hidden[None]


@lru_cache(maxsize=256)
def range_check(first: int, stop: int) -> int:
    """Return a number in [-2^31, 2^31) of the classes [first, stop).

    Modulo 2^32, the numbers of adjacent ranges add up to that of both. So the sum over ranks is the number of [0, V)
    if each class is on one rank, and almost never otherwise.
    """
    return (_hash(stop) - _hash(first) + 2**31) % 2**32 - 2**31


def mark_uncomputed(saved: Tensor, place: int, vocabulary: int) -> None:
    """Write the number of all classes to column `place` of saved sums (K, N).

    A forward pass overwrites it in the rows that it computes. A backward pass may come across the others, whose
    gradient is 0, and must not take them for rows whose classes do not tile the vocabulary.
    """
    column = saved[place]
    column.view(_INTEGERS[column.itemsize]).fill_(range_check(0, vocabulary))


def _hash(number: int) -> int:
    """Return the finaliser of MurmurHash3 (Appleby): it maps 32 bits to 32 bits one to one."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        number = (number ^ (number >> shift)) * factor % 2**32
    return number ^ (number >> 16)


def _mixed(integers: Tensor) -> Tensor:
    """Return int64 values whose upper bits depend on all bits of the given ones."""
    product = integers * _MULTIPLIER
    return (product ^ (product >> 32)) * _MULTIPLIER


def _of_support(target: Allowed) -> Tensor:
    """Return a checksum (N,) of the classes of each row."""
    ends = F.pad(_mixed(target.classes.to(torch.int64) + 1).cumsum(0), (1, 0))
    begin, end = (places.to(torch.int64).clamp(0, len(target.classes)) for places in (target.begin, target.end))
    return ends[end] - ends[begin]
