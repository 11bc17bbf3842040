"""The packed sums of rows over some classes, see `xent.backends.torch.contract`: their columns, and how they merge.

All merges (tiles of a row, chunks of a product, ranks of a process group) convert sums to a common reference first.
Where `peak` is -inf, the sums are relative to 0. A column that a call does not have has the number -1.
"""

import triton
import triton.language as tl

from xent.backends.torch.contract import Setting, columns
from xent.backends.triton.groups import Columns
from xent.backends.triton.kernels.algebra import load, row_facts
from xent.backends.triton.kernels.maths import exp, finite, times

__all__ = ["column", "column_numbers", "larger", "load_sums", "owner", "put", "rebased", "target_number"]


def column_numbers(setting: Setting) -> Columns:
    """Return the columns of a call's packed sums."""
    names = columns(setting)
    return Columns(*(names.index(name) if name in names else -1 for name in Columns._fields))


@triton.jit
def column(place, slot, inside, COLUMN: tl.constexpr):
    """Load a column of sums, rows of `slot` elements; 0 if there is no such column."""
    if COLUMN < 0:
        return 0.0
    else:
        return load(place + COLUMN * slot, inside, 0.0)


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
def load_sums(place, slot, inside, reference, columns: tl.constexpr):
    """Return rest, below, mixed, squares, deficit, weights and counted, relative to a larger, finite reference."""
    weights = column(place, slot, inside, columns.weights)
    counted = column(place, slot, inside, columns.counted)
    rest, below, mixed, squares, deficit = rebased(
        reference, column(place, slot, inside, 0), column(place, slot, inside, 1),
        column(place, slot, inside, columns.below), weights, column(place, slot, inside, columns.mixed),
        column(place, slot, inside, columns.squares), column(place, slot, inside, columns.deficit), counted,
    )  # fmt: skip
    return rest, below, mixed, squares, deficit, weights, counted


@triton.jit
def target_number(row, inside, rows):
    """Return the target of a row as the sums have it, by which ranks compare their targets: its bits as a float."""
    return load(rows.target + row, inside, 0).to(tl.int32).to(tl.float32, bitcast=True)


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
