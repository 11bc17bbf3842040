"""The sums of rows over the classes of one rank or tile, from logits in memory. One program per row.

Logits are read once: the reference of a row is the largest x of its first block without the target. Only rows whose sum
relative to it is less than 1/2, or too large, are read again with the largest x of all classes. The target is only in
its own column, as its raw logit.

Exponents are (x - reference) * log2(e), with the subtraction first, for 16-bit logits too (EXACT in `fold`). References
differ between ranks and tiles, so the rounding error of reference * log2(e) would not cancel.
"""

import triton.language as tl

from xent.backends.triton.kernels.algebra import activation_of, position
from xent.backends.triton.kernels.fold import careful_sums, joined, lane_of_target, quick_sums
from xent.backends.triton.kernels.maths import LN2, NOWHERE, activate, finite, order
from xent.backends.triton.kernels.memory import fetch
from xent.backends.triton.kernels.sums import column, larger, owner, put, rebased
from xent.backends.triton.prepared import kernel

__all__ = ["fold_kernel"]

# With a sum of at least 1/2, log(sum + e^(target - reference)) does not cancel, whichever term is larger.
LEAST = tl.constexpr(0.5)
LARGEST = tl.constexpr(1e18)


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
    WEIGHT: tl.constexpr,  # these are columns of `sums`, -1 if there is none
    BELOW: tl.constexpr,
    WEIGHTS: tl.constexpr,
    MIXED: tl.constexpr,
    SQUARES: tl.constexpr,
    DEFICIT: tl.constexpr,
    COUNTED: tl.constexpr,
    KEY: tl.constexpr,
    PLACE: tl.constexpr,
    ID: tl.constexpr,
    COLUMNS: tl.constexpr,  # K
    ADDS: tl.constexpr,  # merge the sums into those that are there
    ALL_ROWS: tl.constexpr,  # rows with weight 0 are computed
    GROUPED: tl.constexpr,  # these are described in `rows_kernel`
    SKEWED: tl.constexpr,
    RAGGED: tl.constexpr,
    VECTOR: tl.constexpr,
    WHOLE: tl.constexpr,
    QUICK: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the sums of one row."""
    SMOOTHED: tl.constexpr = BELOW >= 0
    ENTROPY: tl.constexpr = MIXED >= 0
    SQUARED: tl.constexpr = SQUARES >= 0
    AVERAGED: tl.constexpr = DEFICIT >= 0
    PREDICTED: tl.constexpr = KEY >= 0
    here = tl.program_id(0).to(tl.int64)
    row = start + here
    if rows.order is not None:
        row = tl.load(rows.order + row)
    owned, y, a, ignored = owner(row, None, rows, ignore_index, first, width, vocabulary)
    softcap, logit_scale = activation_of(row, None, rows, softcap, logit_scale)
    place = sums + here
    if ID >= 0:
        tl.store(place + ID * slot, tl.load(rows.target + row).to(tl.int32).to(tl.float32, bitcast=True))
    if (ignored if ALL_ROWS else ignored | (a == 0)) != 0:
        for index in tl.static_range(COLUMNS):
            if index != ID:
                tl.store(place + index * slot, -float("inf") if index == 0 or index == KEY else 0.0)
    else:
        class_weight = rows.class_weight
        if class_weight is not None:
            class_weight += first_here
        begin = position(here, logits_inner, logits_outer, logits_row, GROUPED)
        off = 0
        if SKEWED:
            off = ((skew + begin) % VECTOR).to(tl.int32)
        source = tl.multiple_of(logits + (begin - off), 16) if VECTOR > 1 else logits + begin
        last = (width + off - 1) // BLOCK * BLOCK
        whole = tl.where(width > 0, (width + off + VECTOR - 1) // VECTOR * VECTOR, 0)  # without classes, no memory
        first_block = fetch(source, 0, whole, BLOCK, VECTOR, "evict_last")
        second_block = fetch(source, BLOCK, whole, BLOCK, VECTOR, "evict_last")
        if target_logits is None:
            z_y = tl.load(logits + begin + y, mask=owned, other=0.0).to(tl.float32)
        else:
            z_y = tl.where(owned, tl.load(target_logits + here), 0.0)
        lane, classes, in_lane, z_lane = lane_of_target(source, off, y, width, BLOCK, LANES, BLOCKS)
        m, _exact, s, t, u, q, v, best, at = quick_sums(
            source, first_block, second_block, off, last, whole, width, y, class_weight, logit_scale, softcap,
            BLOCK, LANES, BLOCKS, WHOLE, SKEWED, RAGGED, VECTOR, True, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY,
            SQUARED, AVERAGED, PREDICTED,
        )  # fmt: skip
        rest, mixed, below, squares, level = joined(
            s, t, u, q, v, off, lane, classes, in_lane, z_lane, m, True, class_weight, logit_scale, softcap,
            LANES, SKEWED, True, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY, SQUARED, AVERAGED,
        )  # fmt: skip
        if ((rest >= LEAST) & (rest < LARGEST)) == 0:
            m, _exact, s, t, u, q, v = careful_sums(
                source, off, last, whole, width, y, -float("inf"), class_weight, logit_scale, softcap,
                BLOCK, LANES, RAGGED, VECTOR, True, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY, SQUARED, AVERAGED,
            )  # fmt: skip
            rest, mixed, below, squares, level = joined(
                s, t, u, q, v, off, lane, classes, in_lane, z_lane, m, True, class_weight, logit_scale, softcap,
                LANES, SKEWED, True, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY, SQUARED, AVERAGED,
            )  # fmt: skip

        peak = tl.where(rest == 0, -float("inf"), m)
        mixed *= LN2
        below *= LN2
        counted = width.to(tl.float32)
        deficit = 0.0
        if AVERAGED:
            x_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED, False)
            deficit = tl.where(owned, (counted - 1) * m - level + (m - x_y), counted * m - level)
        w_y = tl.where(owned, 1.0, 0.0)
        weights = counted
        if class_weight is not None:
            w_y = tl.load(class_weight + y, mask=owned, other=0.0)
            if SMOOTHED:
                weights = tl.load(total_weight)
        weights -= w_y
        top = 0.0
        found = tl.zeros_like(y)
        if PREDICTED:
            top = tl.max(best, 0)
            block = tl.min(tl.where(best == top, at, NOWHERE), 0)
            z = fetch(source, block, whole, BLOCK, VECTOR, "evict_first")
            ids = block + tl.arange(0, BLOCK) - off
            inside = (ids >= 0) & (ids < width)
            found = first + tl.min(tl.where(inside & (order(z, inside, logit_scale, SCALED) == top), ids, NOWHERE), 0)
        if ADDS:
            other_peak = tl.load(place)
            reference = finite(tl.maximum(peak, other_peak))
            other_counted = column(place, slot, None, COUNTED)
            other_weights = column(place, slot, None, WEIGHTS)
            rest, below, mixed, squares, deficit = rebased(
                reference, peak, rest, below, weights, mixed, squares, deficit, counted
            )
            rest_0, below_0, mixed_0, squares_0, deficit_0 = rebased(
                reference, other_peak, tl.load(place + slot), column(place, slot, None, BELOW), other_weights,
                column(place, slot, None, MIXED), column(place, slot, None, SQUARES),
                column(place, slot, None, DEFICIT), other_counted,
            )  # fmt: skip
            peak = tl.maximum(peak, other_peak)
            rest += rest_0
            below += below_0
            mixed += mixed_0
            squares += squares_0
            deficit += deficit_0
            z_y += tl.load(place + 2 * slot)
            w_y += column(place, slot, None, WEIGHT)
            weights += other_weights
            counted += other_counted
            if PREDICTED:
                other = tl.load(place + PLACE * slot).to(tl.int32, bitcast=True)
                top, found = larger(tl.load(place + KEY * slot), other, top, found)
        tl.store(place, peak)
        tl.store(place + slot, rest)
        tl.store(place + 2 * slot, z_y)
        put(place, slot, None, w_y, WEIGHT)
        put(place, slot, None, below, BELOW)
        put(place, slot, None, weights, WEIGHTS)
        put(place, slot, None, mixed, MIXED)
        put(place, slot, None, squares, SQUARES)
        put(place, slot, None, deficit, DEFICIT)
        put(place, slot, None, counted, COUNTED)
        put(place, slot, None, top, KEY)
        put(place, slot, None, found.to(tl.float32, bitcast=True), PLACE)
