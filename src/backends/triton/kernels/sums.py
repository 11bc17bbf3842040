"""The packed sums of rows over some classes, see `xent.backends.torch.contract`: their columns, and how they merge.

All merges (tiles of a row, chunks of a product, ranks of a process group) convert sums to a common reference first.
Where `peak` is -inf, the sums are relative to 0. A column that a call does not have has the number -1.
"""

import triton
import triton.language as tl

from xent.backends.torch.contract import Setting, columns
from xent.backends.triton.kernels.algebra import row_facts
from xent.backends.triton.kernels.maths import exp, finite, times

__all__ = ["column", "column_numbers", "larger", "owner", "put", "rebased"]

_COLUMNS = {
    "WEIGHT": "row_weight",
    "BELOW": "below",
    "WEIGHTS": "weights",
    "MIXED": "mixed",
    "SQUARES": "squares",
    "DEFICIT": "deficit",
    "COUNTED": "counted",
    "KEY": "key",
    "PLACE": "place",
    "ID": "id",
}


def column_numbers(setting: Setting) -> dict[str, int]:
    """Return the kernels' constants: the number of each column of packed sums, -1 if it is not needed."""
    names = columns(setting)
    return {constant: names.index(name) if name in names else -1 for constant, name in _COLUMNS.items()}


@triton.jit
def column(place, slot, inside, COLUMN: tl.constexpr):
    """Load a column of sums, rows of `slot` elements; 0 if there is no such column."""
    if COLUMN < 0:
        return 0.0
    elif inside is None:
        return tl.load(place + COLUMN * slot)
    else:
        return tl.load(place + COLUMN * slot, mask=inside, other=0.0)


@triton.jit
def put(place, slot, inside, value, COLUMN: tl.constexpr):
    """Store a column of sums, if there is such a column."""
    if COLUMN >= 0:
        tl.store(place + COLUMN * slot, value, mask=inside)


@triton.jit
def rebased(reference, peak, rest, below, weights, mixed, squares, deficit, counted):
    """Return rest, below, mixed, squares and deficit relative to a larger, finite reference."""
    factor = exp(peak - reference)
    growth = reference - finite(peak)
    return (
        rest * factor,
        below + times(weights, growth),
        factor * (mixed - growth * rest),
        factor * factor * squares,
        deficit + times(counted, growth),
    )


@triton.jit
def larger(key, place, other_key, other_place):
    """Return the larger of two keys and its class; the lowest class if they are equal."""
    lower = tl.minimum(place, other_place)
    found = tl.where(key > other_key, place, tl.where(other_key > key, other_place, lower))
    return tl.maximum(key, other_key), found


@triton.jit
def owner(row, inside, rows, ignore_index, first, width, vocabulary):
    """Return whether the target of a row is among the classes [first, first + width), and its place among them.

    The place is `width` if it is not. Return also the row's sample weight, and whether it is ignored.
    """
    y, a, ignored, invalid = row_facts(row, inside, rows, ignore_index, vocabulary)
    owned = (y >= first) & (y < first + width) & ~(ignored | invalid)
    return owned, tl.where(owned, y - first, width).to(tl.int32), a, ignored
