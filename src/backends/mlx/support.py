"""Supports (the classes that a sampler allowed for each row) as lazy MLX arrays, and sums over them.

The M entries of all rows are one list, row after row. The number of entries of a row is not known, because MLX is lazy.
So a sum over each row is a segmented scan over all entries, in log2(longest row) passes and in an order that does not
depend on the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from xent.backends.mlx.checks import check_support
from xent.backends.mlx.shifts import shifted
from xent.core.spec import Support

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

    def within(self, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Return (mask of the entries in rows [start, stop), their row minus start), (M,) each."""
        inside = self.owned & (self.owner >= start) & (self.owner < stop)
        return inside, mx.where(inside, self.owner - start, 0)

    def _total(self, values: mx.array, combine: _Combine, neutral: float) -> mx.array:
        place, step = mx.arange(values.shape[-1]), 1
        while step < self.longest:
            nothing = mx.full((*values.shape[:-1], step), neutral, dtype=values.dtype)
            before = mx.concatenate([nothing, values[..., :-step]], axis=-1)
            values = mx.where(place - step >= self.first, combine(values, before), values)
            step *= 2
        return mx.where(self.count > 0, values[..., self.last], mx.array(neutral, values.dtype))


def gather_entries(support: Support, shape: tuple[int, ...], vocabulary: int, shift: int) -> Entries:
    """Return the entries of a support for targets of this shape; row t has the entries of target t + shift."""
    check_support(support, vocabulary)
    rows, given = int(np.prod(shape)), len(support.ids)
    ids, offsets = support.ids.astype(mx.int64), support.offsets.astype(mx.int64)
    if not given:
        ids = mx.zeros((1,), mx.int64)
    total, counts = len(ids), offsets[1:] - offsets[:-1]
    broken = (offsets[0] != 0) | (offsets[-1] != given) | ((counts < 0) | (counts > vocabulary)).any()
    starts, stops = (mx.clip(part, 0, total).astype(mx.int32) for part in (offsets[:-1], offsets[1:]))
    # The index of an entry's row is the number of rows that end before it.
    ends = mx.zeros((total + 1,), mx.int32).at[stops].add(mx.ones((rows,), mx.int32))
    place = mx.minimum(mx.cumsum(ends)[:total], rows - 1)
    outside = (ids < 0) | (ids >= vocabulary)
    strays = mx.zeros((rows,), mx.int32).at[place].add(outside.astype(mx.int32))

    def moved(values: mx.array, fill: int | bool) -> mx.array:
        return shifted(values.reshape(shape), shift, fill).reshape(-1)

    return Entries(
        ids=mx.where(outside, 0, ids).astype(mx.int32),
        owner=mx.maximum(place - shift, 0),
        owned=(mx.arange(total) < stops[place]) & (place % shape[-1] >= shift if shift else place >= 0),
        first=starts[place],
        last=mx.maximum(moved(stops, 1) - 1, 0),
        count=moved(stops - starts, 0),
        wrong=broken | moved(strays > 0, False),
        longest=min(total, vocabulary),
    )
