"""Supports (the classes that a sampler allowed for each row) as lazy MLX arrays, and sums over them.

The M entries of all rows are one list, row after row. The number of entries of a row is not known, because MLX is lazy.
So a sum over each row is a segmented scan over all entries, in log2(longest row) passes and in an order that does not
depend on the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from xent.core.call import Allowed

__all__ = ["Entries", "gather_entries"]

_Combine = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True, eq=False)
class Entries:
    """M >= 1 entries of N rows."""

    ids: mx.array
    """(M,) int32 in [0, V)."""
    owner: mx.array
    """(M,) int32 in [0, N): the row of each entry."""
    owned: mx.array
    """(M,) bool: whether the entry belongs to a row; those of targets that `shift` drops do not."""
    first: mx.array
    """(M,) int32: the first entry of the same row."""
    last: mx.array
    """(N,) int32 in [0, M): the last entry of each row."""
    count: mx.array
    """(N,) int32: the number of entries of each row."""
    wrong: mx.array
    """(N,) bool: rows of an invalid support."""
    longest: int
    """The largest possible number of entries of a row."""

    def sums(self, values: mx.array) -> mx.array:
        """Return the sums (..., N) over each row of values (..., M)."""
        return self._total(values, mx.add, 0)

    def largest(self, values: mx.array) -> mx.array:
        """Return the largest value of each row, (..., N), for values (..., M); -inf for empty rows."""
        return self._total(values, mx.maximum, -mx.inf)

    def lowest(self, values: mx.array) -> mx.array:
        """Return the lowest integer of each row, (N,), for values (M,); the largest integer for empty rows."""
        return self._total(values, mx.minimum, mx.iinfo(values.dtype).max)

    def of(self, values: mx.array) -> mx.array:
        """Repeat values (N,) per row for each entry, (M,)."""
        return values[self.owner]

    def within(self, part: slice) -> tuple[mx.array, mx.array]:
        """Return (mask of the entries in these rows, their row in the part), (M,) each."""
        inside = self.owned & (self.owner >= part.start) & (self.owner < part.stop)
        return inside, mx.where(inside, self.owner - part.start, 0)

    def _total(self, values: mx.array, combine: _Combine, neutral: float) -> mx.array:
        place, step = mx.arange(values.shape[-1]), 1
        while step < self.longest:
            nothing = mx.full((*values.shape[:-1], step), neutral, dtype=values.dtype)
            before = mx.concatenate([nothing, values[..., :-step]], axis=-1)
            values = mx.where(place - step >= self.first, combine(values, before), values)
            step *= 2
        return mx.where(self.count > 0, values[..., self.last], mx.array(neutral, values.dtype))


def gather_entries(target: Allowed, vocabulary: int) -> Entries:
    """Return the entries of a prepared support. Entries outside of [0, V) make their row wrong."""
    begin, end, total = target.begin, target.end, len(target.classes)
    rows, place = len(begin), mx.arange(total, dtype=mx.int32)
    # The row of an entry is the last non-empty row that begins at the entry or before it.
    starts = mx.zeros((total + 1,), mx.int32).at[mx.where(end > begin, begin, total)].maximum(mx.arange(rows))
    owner = mx.cummax(starts)[:total]
    owned = (place >= begin[owner]) & (place < end[owner])
    outside = owned & ((target.classes < 0) | (target.classes >= vocabulary))
    strays = mx.zeros((rows,), mx.int32).at[owner].add(outside.astype(mx.int32))
    return Entries(
        ids=mx.where(owned & ~outside, target.classes, 0).astype(mx.int32),
        owner=owner,
        owned=owned,
        first=begin[owner],
        last=mx.maximum(end - 1, 0),
        count=mx.maximum(end - begin, 0),
        wrong=target.broken | (strays > 0),
        longest=min(total, vocabulary),
    )
