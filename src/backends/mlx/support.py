"""Rows with a support (the classes that a sampler allowed for each row), as lazy MLX arrays.

The M entries of all rows are one list, row after row. The number of entries of a row is not known, because MLX is lazy.
So a sum over each row is a segmented scan over all entries, in log2(longest row) passes and in an order that does not
depend on the device.

The logits (M,) of the entries, called picks, are gathered from the logits chunk by chunk. Sums over the vocabulary are
sums over a row's entries. The gradient of all other logits is 0. If the target is not among its row's entries, the loss
is inf and has no gradient. Targets are class indices, and there is no label smoothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

from xent.backends.mlx.block import Block
from xent.backends.mlx.facts import Facts
from xent.backends.mlx.finish import coefficients, finish
from xent.backends.mlx.kernels import Results, RowFacts, asked
from xent.backends.mlx.sources import Loaded
from xent.core.call import Allowed

__all__ = ["Entries", "Supported", "gather_entries"]

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

    def within(self, part: slice) -> tuple[mx.array, mx.array]:
        """Return (mask of the entries in these rows, their row in the part), (M,) each."""
        inside = self.owned & (self.owner >= part.start) & (self.owner < part.stop)
        return inside, mx.where(inside, self.owner - part.start, 0)

    def combined(self, values: mx.array, combine: _Combine, neutral: float) -> mx.array:
        """Return the values (M,) of each row combined, (N,); `neutral` for empty rows."""
        place, step = mx.arange(len(values)), 1
        while step < self.longest:
            before = mx.concatenate([mx.full((step,), neutral, dtype=values.dtype), values[:-step]])
            values = mx.where(place - step >= self.first, combine(values, before), values)
            step *= 2
        return mx.where(self.count > 0, values[self.last], mx.array(neutral, values.dtype))


class Supported:
    """The steps of log-probabilities with supports: see `xent.backends.mlx.driver`."""

    def __init__(self, facts: Facts, entries: Entries) -> None:
        self._facts, self._entries = facts, entries
        self._picks = mx.zeros(entries.ids.shape, facts.rows.weight.dtype)
        assert facts.rows.target is not None
        # Computed once: mx.compile fails if a graph has them twice.
        self._hit = entries.owned & (entries.ids == facts.rows.target[entries.owner])
        self._member = entries.combined(self._hit.astype(mx.float32), mx.maximum, 0) > 0

    def forward(self, loaded: Loaded, part: slice, wanted: bool) -> Results:
        """Pick logits. `backward` computes gradients."""
        inside, row = self._entries.within(part)
        picked = loaded.logits[row, self._entries.ids].astype(self._picks.dtype)
        self._picks = mx.where(inside, picked, self._picks)
        return {"picks": self._picks}

    def found(self) -> Results:
        """Return the results of all rows, after the forward pass."""
        rows, names = self._facts.rows, asked(self._facts.call.options.stats, False)
        return finish(self._block(rows).fold(names), rows, names)

    def backward(self, facts: Facts, found: Results) -> Callable[[Loaded, slice], mx.array]:
        """Return the function that places the gradients of the picks of some rows; it needs no logits."""
        entries, rows, invalid = self._entries, facts.rows, facts.invalid
        peak, log_sum = found["norm"][:, 0], found["norm"][:, 1]
        upstream = dict(rows.upstream)
        if "nll" in upstream:
            upstream["nll"] = mx.where(self._member, upstream["nll"], 0)
        rows = replace(rows, scale=mx.where(self._member, rows.scale, 0), upstream=upstream)
        values = self._block(rows).gradient(coefficients(rows, peak + log_sum, 1), peak, log_sum)
        assert invalid is not None

        def step(loaded: Loaded, part: slice) -> mx.array:
            inside, row = entries.within(part)
            # Computed after the part before, as the rows are.
            some = mx.depends(values.astype(loaded.rows.dtype), [loaded.rows])
            nothing = mx.where(invalid[part, None], mx.nan, 0).astype(some.dtype)
            grad = mx.broadcast_to(nothing, (part.stop - part.start, facts.vocabulary))
            return grad.at[row, entries.ids].add(mx.where(inside, some, 0))

        return step

    def _block(self, rows: RowFacts) -> Block:
        return _Block(self._picks, rows, self._entries, self._hit, self._member)


class _Block(Block):
    """The picks z (M,) of N rows in place of logits (R, V)."""

    def __init__(self, z: mx.array, facts: RowFacts, entries: Entries, hit: mx.array, member: mx.array) -> None:
        """`hit` (M,) is true for the entries that are the target of their row, `member` (N,) for rows that have one."""
        self._entries, self._hit, self._member = entries, hit, member
        super().__init__(z, facts)
        self.fast, self.apart = False, True

    def over(self, values: mx.array) -> mx.array:
        """Repeat values (N,) for each entry."""
        return values[self._entries.owner]

    def total(self, values: mx.array) -> mx.array:
        """Return the sum (N,) over each row, NaN for invalid ones."""
        return mx.where(self._entries.wrong, mx.nan, self._entries.combined(values, mx.add, 0))

    def most(self, values: mx.array) -> mx.array:
        """Return the largest value (N,) of each row; -inf for empty rows, NaN for invalid ones."""
        return mx.where(self._entries.wrong, mx.nan, self._entries.combined(values, mx.maximum, -mx.inf))

    def with_target(self, values: mx.array, new: mx.array) -> mx.array:
        """Return values (M,) with new ones (N,) for the targets."""
        return mx.where(self._hit, self.over(new), values)

    def below_target(self, peak: mx.array) -> mx.array:
        """Return peak - x_y (N,); inf if the target is not in its row."""
        x = self._entries.combined(mx.where(self._hit, self.x, -mx.inf), mx.maximum, -mx.inf)
        return mx.where(self._member, peak - x, mx.inf)

    def best(self) -> mx.array:
        """Return the class of the largest scaled logit before the softcap; 0 for empty rows."""
        entries, key = self._entries, self.signed()
        key = mx.where(mx.isnan(key), mx.inf, key)
        best, most = entries.combined(key, mx.maximum, -mx.inf), mx.iinfo(mx.int32).max
        chosen = entries.combined(mx.where(key == self.over(best), entries.ids, most), mx.minimum, most)
        return mx.where(entries.count == 0, 0, chosen)

    def mean(self, below: mx.array, peak: mx.array) -> mx.array:
        """Return the mean of x (N,); 0 for empty rows."""
        entries = self._entries
        mean = mx.where(peak == -mx.inf, -mx.inf, peak - self.total(below) / entries.count)
        return mx.where((entries.count == 0) & ~entries.wrong, 0, mean)

    def finished(self, grad: mx.array, delta: mx.array | None) -> mx.array:
        """Return the gradient with respect to z, 0 for entries of no row."""
        return mx.where(self._entries.owned, super().finished(grad, delta), 0)

    def _softmax(self, peak: mx.array) -> tuple[mx.array, mx.array]:
        """Return p with 0 for the target, and the normalizer, 0 for empty rows."""
        p, log_sum = super()._softmax(peak)
        return p, mx.where(self._entries.count == 0, 0, log_sum)


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
