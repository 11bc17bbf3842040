"""The sums of rows over the classes of one rank or tile, from logits in memory. One program per row.

Logits are read once: the reference of a row is the largest x of its first block without the target. Only rows whose sum
relative to it is less than 1/2, or too large, are read again with the largest x of all classes. The target is only in
its own column, as its raw logit.

Exponents are (x - reference) * log2(e), with the subtraction first, for 16-bit logits too (`Way.exact`). References
differ between ranks and tiles, so the rounding error of reference * log2(e) would not cancel.
"""

import triton.language as tl

from xent.backends.triton.kernels.algebra import activation_of, row_at
from xent.backends.triton.kernels.fold import lane_of_target, row_sums
from xent.backends.triton.kernels.maths import LN2, activate, finite
from xent.backends.triton.kernels.memory import aligned, fetch, offset
from xent.backends.triton.kernels.sums import column, larger, load_sums, owner, put, rebased, target_number
from xent.backends.triton.prepared import kernel

__all__ = ["fold_kernel"]


@kernel
def fold_kernel(
    logits,  # rows at position(row, inner, outer, stride)
    logits_inner: "i64",
    logits_outer: "i64",
    logits_row: "i64",
    skew: "i64",  # offset of `logits` from a multiple of 16 bytes, in elements
    sums,  # (K, R) float32, rows `slot` apart
    slot: "i64",
    target_logits,  # (R,) float32 or None: replace the targets' raw logits
    rows,
    start: "i64",  # index of the first row in `rows.order`, or in the call
    total_weight,  # () float32: the sum of the class weights of these classes; None if they are all 1
    ignore_index: "i64",
    first: "i32",  # the first class of the logits
    first_here: "i32",  # the same, relative to the rank's
    width: "i32",  # the number of classes
    vocabulary: "i32",
    softcap: "fp32",
    logit_scale: "fp32",
    columns: tl.constexpr,  # see `Columns`
    way: tl.constexpr,  # see `Way`
    COLUMNS: tl.constexpr,  # K
    ADDS: tl.constexpr,  # merge the sums into those that are there
):
    """Write the sums of one row."""
    here = tl.program_id(0).to(tl.int64)
    row = row_at(start + here, None, rows)
    owned, y, a, ignored = owner(row, None, rows, ignore_index, first, width, vocabulary)
    softcap, logit_scale = activation_of(row, None, rows, softcap, logit_scale)
    bend = logit_scale if way.scaled else None, softcap if way.capped else None
    place = sums + here
    if columns.id >= 0:
        put(place, slot, None, target_number(row, None, rows), columns.id)
    if (ignored if way.all_rows else ignored | (a == 0)) != 0:
        for index in tl.static_range(COLUMNS):
            if index != columns.id:
                tl.store(place + index * slot, -float("inf") if index == 0 or index == columns.key else 0.0)
    else:
        class_weight = rows.class_weight
        if class_weight is not None:
            class_weight += first_here
        off = offset(here, logits_inner, logits_outer, logits_row, skew, way)
        source = aligned(logits, here, logits_inner, logits_outer, logits_row, -off, way)
        last = (width + off - 1) // way.block * way.block
        whole = tl.where(width > 0, (width + off + way.vector - 1) // way.vector * way.vector, 0)  # or no memory
        z = fetch(source, 0, whole, way, "evict_last")
        ahead = fetch(source, way.block, whole, way, "evict_last")
        if target_logits is None:
            z_y = tl.load(source + (off + y), mask=owned, other=0.0).to(tl.float32)
        else:
            z_y = tl.where(owned, tl.load(target_logits + here), 0.0)
        target_lane = lane_of_target(source, off, y, width, way)
        line = source, off, last, whole, width
        m, rest, mixed, below, squares, level, top, found = row_sums(
            line, z, ahead, y, None, owned, target_lane, class_weight, bend, way
        )
        peak = tl.where(rest == 0, -float("inf"), m)
        mixed *= LN2
        below *= LN2
        found += first
        counted = width.to(tl.float32)
        deficit = 0.0
        if way.averaged:
            x_y = activate(z_y, bend, False)
            deficit = tl.where(owned, (counted - 1) * m - level + (m - x_y), counted * m - level)
        w_y = tl.where(owned, 1.0, 0.0)
        weights = counted
        if class_weight is not None:
            w_y = tl.load(class_weight + y, mask=owned, other=0.0)
            if way.smoothed:
                weights = tl.load(total_weight)
        weights -= w_y
        if ADDS:
            other_peak = tl.load(place)
            reference = finite(tl.maximum(peak, other_peak))
            rest, below, mixed, squares, deficit = rebased(
                reference, peak, rest, below, weights, mixed, squares, deficit, counted
            )
            rest_0, below_0, mixed_0, squares_0, deficit_0, weights_0, counted_0 = load_sums(
                place, slot, None, reference, columns
            )
            peak = tl.maximum(peak, other_peak)
            rest += rest_0
            below += below_0
            mixed += mixed_0
            squares += squares_0
            deficit += deficit_0
            z_y += tl.load(place + 2 * slot)
            w_y += column(place, slot, None, columns.row_weight)
            weights += weights_0
            counted += counted_0
            if way.predicted:
                other = tl.load(place + columns.place * slot).to(tl.int32, bitcast=True)
                top, found = larger(tl.load(place + columns.key * slot), other, top, found)
        put(place, slot, None, peak, 0)
        put(place, slot, None, rest, 1)
        put(place, slot, None, z_y, 2)
        put(place, slot, None, w_y, columns.row_weight)
        put(place, slot, None, below, columns.below)
        put(place, slot, None, weights, columns.weights)
        put(place, slot, None, mixed, columns.mixed)
        put(place, slot, None, squares, columns.squares)
        put(place, slot, None, deficit, columns.deficit)
        put(place, slot, None, counted, columns.counted)
        put(place, slot, None, top, columns.key)
        put(place, slot, None, found.to(tl.float32, bitcast=True), columns.place)
