"""The first pass over a row: per-lane sums, their sum over lanes without the target; and its kernel for parts of rows.

`_quick_sums` takes exponentials relative to the largest logit of the row's first block, so it needs no maximum over the
row. If that overflows or underflows, `_careful_sums` finds the largest x first. Each lane has the following sums over
its classes, with e = e^(x - m)::

    s = sum e    t = sum e log2 e    u = -sum w log2 e    q = sum e^2    v = sum x

All but s are computed only if they are needed. With class probabilities, w are the shares of classes in the loss
(`shares_of`), and there are three sums more: minus that of probabilities times log2 e, of shares and of probabilities.
A lane also has its largest key (`order`) and the first class of that block.

In a row that does not begin at a multiple of 16 bytes (skewed), a lane has other classes than in an aligned row. Before
lanes are summed they are rotated back, so that a row's loss has the same bits wherever it begins.

`fold_kernel` computes the packed sums of rows over the classes of one rank or tile. Logits are read once: the reference
of a row is the largest x of its first block without the target. Only rows whose sum relative to it is less than 1/2, or
too large, are read again with the largest x of all classes. The target is only in its own column, as its raw logit.
Exponents are (x - reference) * log2(e), with the subtraction first, for 16-bit logits too (`Way.exact`). References
differ between ranks and tiles, so the rounding error of reference * log2(e) would not cancel.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import activation_of, row_at
from xent.backends.triton.kernels.maths import (
    FAR,
    FLOOR,
    LN2,
    LOG2E,
    NOWHERE,
    activate,
    capped_exponent,
    exponent,
    finite,
    order,
    quick_exponent,
    times,
)
from xent.backends.triton.kernels.memory import aligned, fetch, offset, shares_of
from xent.backends.triton.kernels.sums import column, larger, load_sums, owner, plus, put, rebased, target_number
from xent.backends.triton.launches import kernel

__all__ = ["fold_kernel", "lane_of_target", "row_sums"]

# Between these bounds, sums and sums of squares have the full precision of float32.
SMALLEST = tl.constexpr(1e-12)
LARGEST = tl.constexpr(1e18)
# If the first block is all -inf, the reference is 0, which may be far from every logit. The entropy is then a
# difference of numbers as large as the sum's logarithm. So these bounds apply, with or without an entropy.
SMALLEST_FROM_0 = tl.constexpr(0.5)
LARGEST_FROM_0 = tl.constexpr(1048576.0)
# With a sum of at least this, log(sum + e^(target - reference)) does not cancel, whichever term is larger.
SMALLEST_OF_OTHERS = tl.constexpr(0.5)


@triton.jit
def _in_lanes(values, LANES: tl.constexpr):
    """Return the sums of a block over neighbouring elements, (LANES,), which one thread holds."""
    return tl.sum(tl.reshape(values, [LANES, values.shape[0] // LANES]), 1)


@triton.jit
def _exponents(z, reference, bend, way: tl.constexpr, CAREFUL: tl.constexpr):
    """Return log2 of e^(x - reference) for raw logits."""
    if (way.capped and way.quick) and not CAREFUL:
        return capped_exponent(z, bend, reference * LOG2E, way)
    else:
        x = activate(z, bend, way)
        if CAREFUL:
            return exponent(x, reference, way.exact)
        else:
            return quick_exponent(x, reference)


@triton.jit
def _terms(e2, ENTROPY: tl.constexpr):
    """Return 2^e2, and with ENTROPY its product with e2."""
    e = tl.math.exp2(e2)
    return e, e * tl.maximum(e2, FLOOR) if ENTROPY else e


@triton.jit
def _add(
    sums, z, first, line, m, weights, bend, way: tl.constexpr, MASKED: tl.constexpr, AGAIN: tl.constexpr
):  # fmt: skip
    """Add a block to a row's sums. AGAIN: relative to the largest x, without keys."""
    LANES: tl.constexpr = way.lanes
    WIDTH: tl.constexpr = way.block // way.lanes
    s, t, u, q, v, h, shares, mass, best, at = sums
    _source, off, _last, _whole, vocabulary = line
    classes = first + tl.arange(0, way.block) - off
    inside = (classes >= 0) & (classes < vocabulary)
    e2 = _exponents(z, m, bend, way, AGAIN or way.exact)
    if MASKED and (way.ragged or (way.capped or way.scaled)):
        e2 = tl.where(inside, e2, -float("inf"))
    e, mixed = _terms(e2, way.entropy)
    s += _in_lanes(e, LANES)
    if way.entropy:
        t += _in_lanes(mixed, LANES)
    if way.smoothed:
        if weights[0] is not None or weights[1] is not None:
            given, share = shares_of(weights, classes, inside)
            u -= _in_lanes(times(share, e2), LANES)
            if weights[1] is not None:
                h -= _in_lanes(times(given, e2), LANES)
                shares += _in_lanes(share, LANES)
                mass += _in_lanes(given, LANES)
        else:
            u -= _in_lanes(tl.where(inside, e2, 0.0) if MASKED else e2, LANES)
    if way.squared:
        q += _in_lanes(e * e, LANES)
    if way.averaged:
        x = activate(z, bend, way)
        v += _in_lanes(tl.where(inside, x, 0.0) if MASKED else x, LANES)
    if way.predicted and not AGAIN:
        largest = tl.max(tl.reshape(order(z, inside if MASKED else True, bend, way), [LANES, WIDTH]), 1)
        at = tl.where(largest > best, first, at)
        best = tl.maximum(largest, best)
    return s, t, u, q, v, h, shares, mass, best, at


@triton.jit
def _nothing(way: tl.constexpr):
    """Return the sums of no block."""
    LANES: tl.constexpr = way.lanes
    zero = tl.zeros([LANES], tl.float32)
    return zero, zero, zero, zero, zero, zero, zero, zero, zero - float("inf"), tl.zeros([LANES], tl.int32)


@triton.jit
def _quick_sums(line, z, ahead, left_out, weights, bend, way: tl.constexpr):
    """Return the reference m, and the sums of each lane relative to it.

    m is the largest x of the first block. `z` and `ahead` are the raw logits of the first two blocks. The class
    `left_out` is excluded if it is not None. Only the first and the last block are masked. Each block is loaded while
    the previous one is added.
    """
    BLOCK: tl.constexpr = way.block
    source, off, last, whole, vocabulary = line
    classes = tl.arange(0, BLOCK) - off
    seen = activate(z, bend, way)
    if way.skewed:
        seen = tl.where((classes >= 0) & (classes < BLOCK - way.vector) & (classes < vocabulary), seen, -float("inf"))
    elif way.blocks == 1:
        seen = tl.where(classes < vocabulary, seen, -float("inf"))
    if left_out is not None:
        seen = tl.where(classes != left_out, seen, -float("inf"))
    m = finite(tl.max(seen, 0))
    FIRST: tl.constexpr = way.skewed or way.blocks == 1
    sums = _add(_nothing(way), z, 0, line, m, weights, bend, way, FIRST, False)
    end = last + (BLOCK if way.whole else 0)
    for first in range(BLOCK, end, BLOCK):
        z = ahead
        ahead = fetch(source, first + BLOCK, whole, way, "evict_last")
        sums = _add(sums, z, first, line, m, weights, bend, way, False, False)
    if not way.whole:
        if last > 0:
            sums = _add(sums, ahead, last, line, m, weights, bend, way, True, False)
    return m, sums


@triton.jit
def _careful_sums(line, y, x_y, weights, bend, way: tl.constexpr):
    """Return m, the largest x of the row, and the sums of each lane."""
    BLOCK: tl.constexpr = way.block
    source, off, last, whole, vocabulary = line
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, last + 1, BLOCK):
        x = activate(fetch(source, first, whole, way, "evict_last"), bend, way)
        classes = first + tl.arange(0, BLOCK) - off
        inside = (classes >= 0) & (classes < vocabulary) & (classes != y)
        peak = tl.maximum(peak, tl.where(inside, x, -float("inf")))
    m = finite(tl.maximum(tl.max(peak, 0), x_y))
    sums = _nothing(way)
    for first in range(0, last + 1, BLOCK):
        z = fetch(source, first, whole, way, "evict_last")
        sums = _add(sums, z, first, line, m, weights, bend, way, True, True)
    return m, sums


@triton.jit
def lane_of_target(source, off, y, vocabulary, way: tl.constexpr):
    """Return the target's lane, the lane's classes, a mask that excludes the target, and their raw logits.

    Lanes are those of an aligned row. If the target is not in the row, this is any lane, with all its classes.
    """
    WIDTH: tl.constexpr = way.block // way.lanes
    lane = tl.maximum(y, 0) // WIDTH % way.lanes
    k = tl.arange(0, way.blocks * WIDTH)
    classes = k // WIDTH * way.block + lane * WIDTH + k % WIDTH
    inside = (classes < vocabulary) & (classes != y)
    return lane, classes, inside, tl.load(source + (off + classes), mask=inside, other=0.0)


@triton.jit
def _over_lanes(values, off, lane, way: tl.constexpr):
    """Return the sum over all lanes of an aligned row but one."""
    lanes = tl.arange(0, way.lanes)
    if way.skewed:
        values = tl.gather(values, (lanes + off) % way.lanes, 0)
    return tl.sum(tl.where(lanes != lane, values, 0.0), 0)


@triton.jit
def _joined(sums, off, target_lane, reference, weights, bend, way: tl.constexpr, CAREFUL: tl.constexpr):
    """Return the sums s, u, t, q, v and those of class probabilities over all lanes without the target.

    The target's lane is summed again (`lane_of_target`).
    Subtracting the target from a sum would cancel if the target is nearly the whole sum.
    """
    s, t, u, q, v, h, shares, mass, _best, _at = sums
    lane, classes, inside, z = target_lane
    z = z.to(tl.float32)
    e2 = tl.where(inside, _exponents(z, reference, bend, way, CAREFUL), -float("inf"))
    e, mixed = _terms(e2, way.entropy)
    total = _over_lanes(s, off, lane, way) + tl.sum(e, 0)
    mix = 0.0
    if way.entropy:
        mix = _over_lanes(t, off, lane, way) + tl.sum(mixed, 0)
    below = 0.0
    given = 0.0, 0.0, 0.0
    if way.smoothed:
        w = tl.where(inside, 1.0, 0.0)
        if weights[0] is not None or weights[1] is not None:
            probabilities, w = shares_of(weights, classes, inside)
            if weights[1] is not None:
                given = (
                    _over_lanes(h, off, lane, way) - tl.sum(times(probabilities, e2), 0),
                    _over_lanes(shares, off, lane, way) + tl.sum(w, 0),
                    _over_lanes(mass, off, lane, way) + tl.sum(probabilities, 0),
                )
        below = _over_lanes(u, off, lane, way) - tl.sum(times(w, e2), 0)
    squares = 0.0
    if way.squared:
        squares = _over_lanes(q, off, lane, way) + tl.sum(e * e, 0)
    level = 0.0
    if way.averaged:
        level = _over_lanes(v, off, lane, way) + tl.sum(tl.where(inside, activate(z, bend, way), 0.0), 0)
    return total, below, mix, squares, level, given[0], given[1], given[2]


@triton.jit
def row_sums(
    line, z, ahead, y, x_y, owned, target_lane, weights, bend, way: tl.constexpr
):  # fmt: skip
    """Return m, the sums of a row without its target y (`_joined`), its largest key, and the key's class.

    `line` is (row, `offset`, where the last block begins, where the last vector ends, V), with places from the offset.
    With the target's x, m may be that. If x_y is None, m is near the largest x of the others, as sums need that are
    merged with those of other classes. `owned`: whether the target is in the row.
    """
    source, off, _last, whole, vocabulary = line
    left_out = y if x_y is None else None
    m, lanes = _quick_sums(line, z, ahead, left_out, weights, bend, way)
    sums = _joined(lanes, off, target_lane, m, weights, bend, way, way.exact)
    rest = sums[0]
    if x_y is None:
        largest = -float("inf")
        fits = (rest >= SMALLEST_OF_OTHERS) & (rest < LARGEST)
    else:
        largest = tl.where(owned, x_y, -float("inf"))
        total = rest + tl.where(owned, tl.math.exp2(exponent(x_y, m, way.exact)), 0.0)
        least = tl.where(m == 0, SMALLEST_FROM_0, SMALLEST)
        most = tl.where(m == 0, LARGEST_FROM_0, LARGEST)
        fits = (total > least) & (total < most)
    if (fits & (way.exact | (tl.abs(m) < FAR))) == 0:
        m, again = _careful_sums(line, y, largest, weights, bend, way)
        sums = _joined(again, off, target_lane, m, weights, bend, way, True)
    top = 0.0
    found = 0
    if way.predicted:
        top = tl.max(lanes[8], 0)
        first = tl.min(tl.where(lanes[8] == top, lanes[9], NOWHERE), 0)
        z = fetch(source, first, whole, way, "evict_last")
        ids = first + tl.arange(0, way.block) - off
        inside = (ids >= 0) & (ids < vocabulary)
        found = tl.min(tl.where(inside & (order(z, inside, bend, way) == top), ids, NOWHERE), 0)
    return m, sums, top, found


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
    numbers,
    start: "i64",  # index of the first row in `rows.order`, or in the call
    total_weight,  # () float32: the sum of the class weights of these classes; None if they are all 1
    ignore_index: "i64",
    first: "i32",  # the first class of the logits
    first_here: "i32",  # the same, relative to the rank's
    width: "i32",  # the number of classes
    vocabulary: "i32",
    columns: tl.constexpr,  # see `Columns`
    way: tl.constexpr,  # see `Way`
    COLUMNS: tl.constexpr,  # K
    ADDS: tl.constexpr,  # merge the sums into those that are there
):
    """Write the sums of one row."""
    here = tl.program_id(0).to(tl.int64)
    row = row_at(start + here, None, rows)
    owned, y, a, ignored = owner(row, None, rows, ignore_index, first, width, vocabulary)
    bend = activation_of(row, None, rows, numbers)
    place = sums + here
    if columns.id >= 0:
        tl.store(place + columns.id * slot, target_number(row, None, rows))
    if (ignored if way.all_rows else ignored | (a == 0)) != 0:
        for index in tl.static_range(COLUMNS):
            if index != columns.id:
                nothing = -float("inf") if index == columns.peak or index == columns.key else 0.0
                tl.store(place + index * slot, nothing)
    else:
        shares = rows.class_weight, None
        if rows.class_weight is not None:
            shares = rows.class_weight + first_here, None
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
        m, found_sums, top, found = row_sums(line, z, ahead, y, None, owned, target_lane, shares, bend, way)
        rest, below, mixed, squares, level, _h, _shares, _mass = found_sums
        peak = tl.where(rest == 0, -float("inf"), m)
        found += first
        counted = width.to(tl.float32)
        deficit = 0.0
        if way.averaged:
            x_y = activate(z_y, bend, way, True)
            deficit = tl.where(owned, (counted - 1) * m - level + (m - x_y), counted * m - level)
        w_y = tl.where(owned, 1.0, 0.0)
        weights = counted
        if rows.class_weight is not None:
            w_y = tl.load(shares[0] + y, mask=owned, other=0.0)
            if way.smoothed:
                weights = tl.load(total_weight)
        made = rest, below * LN2, weights - w_y, mixed * LN2, squares, deficit, counted
        if ADDS:
            other_peak = column(place, slot, None, columns.peak)
            reference = finite(tl.maximum(peak, other_peak))
            made = plus(rebased(reference, peak, made), load_sums(place, slot, None, reference, columns))
            peak = tl.maximum(peak, other_peak)
            z_y += column(place, slot, None, columns.target)
            w_y += column(place, slot, None, columns.row_weight)
            if way.predicted:
                other = column(place, slot, None, columns.place).to(tl.int32, bitcast=True)
                top, found = larger(column(place, slot, None, columns.key), other, top, found)
        put(place, slot, None, made, (peak, z_y, w_y, top, found.to(tl.float32, bitcast=True)), columns)
