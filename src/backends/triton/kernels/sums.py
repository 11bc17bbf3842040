"""The packed sums of rows over some classes, see `xent.backends.torch.contract`: how they merge, and their kernels.

All merges (tiles of a row, chunks of a product, ranks of a process group) convert sums to a common reference first.
Where `peak` is -inf, the sums are relative to 0. A column that a call does not have has the number -1. `sums` are rest,
below, weights, mixed, squares, deficit and counted.

`finish_kernel` serves tiles, products that store no logits, shards, and the backward pass from saved sums. Every rank
computes the same bits.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import (
    LN2,
    LOG2E,
    NOWHERE,
    activate,
    activation_of,
    exp,
    finish,
    finite,
    gradient_factor,
    load,
    numbers_of,
    row_at,
    row_facts,
    target_weight,
    times,
)
from xent.backends.triton.launches import kernel

__all__ = [
    "DEAD",
    "column",
    "finish_kernel",
    "join_kernel",
    "larger",
    "load_sums",
    "owner",
    "plus",
    "put",
    "rebased",
    "target_number",
]


DEAD = tl.constexpr(-2)  # the class of a row whose gradient is 0


@triton.jit
def column(place, slot, inside, COLUMN: tl.constexpr):
    """Load a column of sums, rows of `slot` elements; 0 if there is no such column."""
    if COLUMN < 0:
        return 0.0
    else:
        return load(place + COLUMN * slot, inside, 0.0)


@triton.jit
def _store(place, slot, inside, value, COLUMN: tl.constexpr):
    if COLUMN >= 0:
        tl.store(place + COLUMN * slot, value, mask=inside)


@triton.jit
def put(place, slot, inside, sums, others, columns: tl.constexpr):
    """Store sums in their columns, and the others in the order of `Columns`: peak, target, row_weight, key, place."""
    for k in tl.static_range(7):
        _store(place, slot, inside, sums[k], columns[k])
    for k in tl.static_range(5):
        _store(place, slot, inside, others[k], columns[7 + k])


@triton.jit
def rebased(reference, peak, sums):
    """Return sums relative to a larger, finite reference."""
    rest, below, weights, mixed, squares, deficit, counted = sums
    factor = exp(peak - reference)
    growth = reference - finite(peak)
    return (
        rest * factor,
        below + times(weights, growth),
        weights,
        factor * (mixed - growth * rest),
        factor * factor * squares,
        deficit + times(counted, growth),
        counted,
    )


@triton.jit
def load_sums(place, slot, inside, reference, columns: tl.constexpr):
    """Return sums relative to a larger, finite reference. Those that a call does not have are 0."""
    sums = (
        column(place, slot, inside, columns.rest),
        column(place, slot, inside, columns.below),
        column(place, slot, inside, columns.weights),
        column(place, slot, inside, columns.mixed),
        column(place, slot, inside, columns.squares),
        column(place, slot, inside, columns.deficit),
        column(place, slot, inside, columns.counted),
    )
    return rebased(reference, column(place, slot, inside, columns.peak), sums)


@triton.jit
def plus(a, b):
    """Return the sum of sums that have the same reference."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6]


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


@kernel
def finish_kernel(
    sums,  # (ranks, K, R) float32
    rank_stride: "i64",
    ranks: "i32",
    count: "i64",  # R
    rows,
    upstreams,
    results,
    numbers,
    start: "i64",  # index of the first row in `rows.order`, or in the call
    saved,  # (K, N) float32, in the order of the call, or None
    saved_row: "i64",
    made,  # (6, R) float32 or None: m, factor, the target's gradient, tilt, delta, and the bits of the target's class
    ignore_index: "i64",
    first: "i32",  # the first class of this rank
    width: "i32",
    vocabulary: "i32",
    columns: tl.constexpr,  # see `Columns`
    way: tl.constexpr,  # see `Way`
    BLOCK: tl.constexpr,
):
    """Merge the sums of `BLOCK` rows over all ranks, in rank order. Write results, and coefficients of gradients."""
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    row = row_at(start + here, inside, rows)
    y, a, ignored, invalid = row_facts(row, inside, rows, ignore_index, vocabulary)
    if columns.id >= 0:  # a target that differs between ranks is invalid on all of them
        own = column(sums + here, count, inside, columns.id).to(tl.int32, bitcast=True)
        differs = own != own
        for rank in range(1, ranks):
            other = column(sums + rank * rank_stride + here, count, inside, columns.id)
            differs = differs | (other.to(tl.int32, bitcast=True) != own)
        ignored = ignored & ~differs
        invalid = invalid | differs
        a = tl.where(differs, 1.0, a)

    nothing = tl.zeros([BLOCK], tl.float32)
    peak = nothing - float("inf")
    z_y = nothing
    w_y = nothing
    for rank in range(ranks):
        place = sums + rank * rank_stride + here
        peak = tl.maximum(peak, column(place, count, inside, columns.peak))
        z_y += column(place, count, inside, columns.target)
        w_y += column(place, count, inside, columns.row_weight)
    if columns.row_weight < 0:
        w_y += 1
    bend = activation_of(row, inside, rows, numbers)
    x_y = activate(z_y, bend, way)
    m = finite(tl.maximum(peak, x_y))
    merged = nothing, nothing, nothing, nothing, nothing, nothing, nothing
    key = nothing - float("inf")
    found = tl.full([BLOCK], NOWHERE, tl.int32)
    for rank in range(ranks):
        place = sums + rank * rank_stride + here
        merged = plus(merged, load_sums(place, count, inside, m, columns))
        if columns.key >= 0:
            own_found = column(place, count, inside, columns.place).to(tl.int32, bitcast=True)
            key, found = larger(key, found, column(place, count, inside, columns.key), own_found)
    if saved is not None:
        others = m, z_y, w_y, key, found.to(tl.float32, bitcast=True)
        put(saved + row, saved_row, inside, merged, others, columns)

    rest, below, weights, mixed, squares, deficit, _counted = merged
    dead, r = gradient_factor(row, inside, a, invalid, rows, upstreams)
    distance = x_y - m
    total = rest, below - times(w_y, distance), weights + w_y, mixed * LOG2E, squares
    factor, tilt, delta, g_y, _gamma = finish(
        rows, row, inside, (y, a, ignored, invalid), dead, r, w_y, z_y, m, total, distance * LOG2E,
        m - deficit / vocabulary.to(tl.float32), found, None, results, upstreams,
        numbers_of(rows, vocabulary, numbers), bend, way,
    )  # fmt: skip
    if made is not None:
        own_class = tl.where((y >= first) & (y < first + width), y - first, -1).to(tl.int32)
        own_class = tl.where(ignored if way.statistics else dead, DEAD, own_class)
        found_ones = m, factor, g_y, nothing + tilt, delta, own_class.to(tl.float32, bitcast=True)
        for k in tl.static_range(6):
            tl.store(made + k * count + here, found_ones[k], mask=inside)


@kernel
def join_kernel(
    parts,  # (2 or 3, chunks, R) float32: the largest x, the sum of e, and with an entropy the sum of e log2 e
    chunks: "i32",
    count: "i64",  # R
    sums,  # (K, R) float32, rows `slot` apart
    slot: "i64",
    target_logits,  # (R,) float32
    rows,
    start: "i64",  # index of the first row in `rows.order`, or in the call
    ignore_index: "i64",
    first: "i32",  # the first class of this rank
    width: "i32",  # the number of its classes
    vocabulary: "i32",
    columns: tl.constexpr,  # see `Columns`; tiles have written squares and deficit, with another reference
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # chunks that are read at a time
):
    """Write the sums of a block of rows."""
    here = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = here < count
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    rest = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, chunks, PARTS):
        part = begin + tl.arange(0, PARTS)
        place = parts + part[:, None] * count + here[None, :]
        mask = (part < chunks)[:, None] & inside[None, :]
        part_peak = tl.load(place, mask=mask, other=-float("inf"))
        part_rest = tl.load(place + chunks * count, mask=mask, other=0.0)
        largest = tl.maximum(peak, tl.max(part_peak, 0))
        reference = finite(largest)
        kept = exp(peak - reference)
        share = exp(part_peak - reference[None, :])
        if columns.mixed >= 0:
            part_mixed = tl.load(place + 2 * chunks * count, mask=mask, other=0.0)
            growth = tl.where(part_peak == -float("inf"), 0.0, (reference[None, :] - part_peak) * LOG2E)
            mixed = kept * (mixed - tl.where(peak == -float("inf"), 0.0, (reference - peak) * LOG2E) * rest)
            mixed += tl.sum(share * (part_mixed - growth * part_rest), 0)
        rest = kept * rest + tl.sum(share * part_rest, 0)
        peak = largest
    row = row_at(start + here, inside, rows)
    owned, y, _a, _ignored = owner(row, inside, rows, ignore_index, first, width, vocabulary)
    place = sums + here
    _rest, below, weights, _mixed, squares, deficit, counted = load_sums(place, slot, inside, finite(peak), columns)
    z_y = tl.where(owned, tl.load(target_logits + here, mask=inside, other=0.0), 0.0)
    w_y = tl.where(owned, 1.0, 0.0)
    if columns.row_weight >= 0:
        w_y = tl.where(owned, target_weight(rows, tl.where(owned, y, 0)), 0.0)
    others = peak, z_y, w_y, column(place, slot, inside, columns.key), column(place, slot, inside, columns.place)
    put(place, slot, inside, (rest, below, weights, mixed * LN2, squares, deficit, counted), others, columns)
    if columns.id >= 0:
        tl.store(place + columns.id * slot, target_number(row, inside, rows), mask=inside)
