"""The classes that each row may take, as MLX arrays whose values nobody has seen: who owns each, and sums by rows.

M entries lie one after the other, row by row. How many a row has is a value, so there is no array of rows by entries:
a sum over each row is a scan over all entries that starts anew with each row. It takes log2 of the longest row passes,
in an order that does not depend on the device.
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
    """M >= 1 entries, of which N rows have some each."""

    ids: mx.array
    """(M,) int32 in [0, V)."""
    owner: mx.array
    """(M,) int32 in [0, N): the row that an entry belongs to."""
    owned: mx.array
    """(M,) bool: whether it belongs to a row at all; those of targets that `shift` drops do not."""
    first: mx.array
    """(M,) int32: the first entry of the same list."""
    last: mx.array
    """(N,) int32 in [0, M): the last entry of each row."""
    count: mx.array
    """(N,) int32: how many each row has."""
    wrong: mx.array
    """(N,) bool: rows of a support that describes none."""
    longest: int
    """How many entries a row may have at most."""

    def sums(self, values: mx.array) -> mx.array:
        """Return the sums (..., N) over each row of values (..., M)."""
        return self._total(values, mx.add, 0)

    def largest(self, values: mx.array) -> mx.array:
        """Return the largest (..., N) of each row of values (..., M), -inf where there are none."""
        return self._total(values, mx.maximum, -mx.inf)

    def lowest(self, values: mx.array) -> mx.array:
        """Return the lowest (N,) of each row of integers (M,), the largest there is where there are none."""
        return self._total(values, mx.minimum, mx.iinfo(values.dtype).max)

    def of(self, values: mx.array) -> mx.array:
        """Return what (N,) values the entries' rows have, (M,)."""
        return values[self.owner]

    def within(self, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Return which entries belong to rows [start, stop), and to which of these, (M,) each."""
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
    """Return the entries of a support of targets of this shape; row t has those of the target t + shift."""
    check_support(support, vocabulary)
    rows, given = int(np.prod(shape)), len(support.ids)
    ids, offsets = support.ids.astype(mx.int64), support.offsets.astype(mx.int64)
    if not given:
        ids = mx.zeros((1,), mx.int64)
    total, counts = len(ids), offsets[1:] - offsets[:-1]
    broken = (offsets[0] != 0) | (offsets[-1] != given) | ((counts < 0) | (counts > vocabulary)).any()
    starts, stops = (mx.clip(part, 0, total).astype(mx.int32) for part in (offsets[:-1], offsets[1:]))
    # As many lists end before an entry as there are before its own.
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
