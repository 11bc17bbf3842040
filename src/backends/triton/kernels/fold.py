"""The first pass over a row: per-lane sums, their sum over lanes without the target; and its kernel for parts of rows.

`row_sums` takes exponentials relative to the largest logit of the row's first block but the target, so it needs no
maximum over the row. If that overflows or underflows, it finds the largest x and reads the row again. Each lane has the
following sums over its classes, with e = e^(x - m)::

    s = sum e    t = sum e log2 e    u = -sum w log2 e    q = sum e^2    v = sum x

All but s are computed only if they are needed. With class probabilities, w are the shares of classes in the loss
(`shares_of`), and there are three sums more: minus that of probabilities times log2 e, of shares and of probabilities.
A lane also has its largest key (`order`) and the first class of that block.

In a row that does not begin at a multiple of 16 bytes (skewed), a lane has other classes than in an aligned row. Before
lanes are summed they are rotated back, so that a row's loss has the same bits wherever it begins.

`fold_kernel` computes the packed sums of rows over the classes of one rank or tile. The target is only in its own
column, as its raw logit.
Exponents are (x - reference) * log2(e), with the subtraction first, for 16-bit logits too (`Way.exact`). References
differ between ranks and tiles, so the rounding error of reference * log2(e) would not cancel.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import (
    FAR,
    FLOOR,
    LN2,
    LOG2E,
    NOWHERE,
    activate,
    activation_of,
    exponent,
    finite,
    order,
    quick_exponent,
    row_at,
    times,
)
from xent.backends.triton.kernels.memory import fetch, line_of, shares_of
from xent.backends.triton.kernels.sums import column, larger, load_sums, owner, plus, put, rebased, target_number
from xent.backends.triton.launches import kernel

__all__ = ["first_loads", "fold_kernel", "row_sums"]

# Between these bounds, sums and sums of squares have the full precision of float32, and log(sum + e^(target - m)) does
# not cancel, whichever term is larger.
SMALLEST = tl.constexpr(0.5)
LARGEST = tl.constexpr(1e18)
# If the first block is all -inf, m is 0, which may be far from every logit. The entropy is then a difference of numbers
# as large as the sum's logarithm.
LARGEST_FROM_0 = tl.constexpr(1048576.0)


@triton.jit
def _in_lanes(values, LANES: tl.constexpr):
    """Return the sums of a block over neighbouring elements, (LANES,), which one thread holds."""
    return tl.sum(tl.reshape(values, [LANES, values.shape[0] // LANES]), 1)


@triton.jit
def _exponents(z, reference, bend, way: tl.constexpr, CAREFUL: tl.constexpr):
    """Return log2 of e^(x - reference) for raw logits."""
    if CAREFUL:
        return exponent(activate(z, bend, way), reference, way.exact)
    else:
        return quick_exponent(z, bend, reference * LOG2E, way)


@triton.jit
def _add(
    sums, z, first, line, m, weights, bend, way: tl.constexpr, MASKED: tl.constexpr, AGAIN: tl.constexpr
):  # fmt: skip
    """Add a block to a row's sums. AGAIN: relative to the largest x, without keys."""
    LANES: tl.constexpr = way.lanes
    s, t, u, q, v, h, shares, mass, best, at = sums
    _source, off, _last, _whole, vocabulary = line
    classes = first + tl.arange(0, way.block) - off
    inside = (classes >= 0) & (classes < vocabulary)
    e2 = _exponents(z, m, bend, way, AGAIN or way.exact)
    if MASKED and (way.ragged or (way.capped or way.scaled)):
        e2 = tl.where(inside, e2, -float("inf"))
    e = tl.math.exp2(e2)
    s += _in_lanes(e, LANES)
    if way.entropy:
        t += _in_lanes(e * tl.maximum(e2, FLOOR), LANES)
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
        largest = order(z, inside if MASKED else True, bend, way)
        largest = tl.max(tl.reshape(largest, [LANES, way.block // LANES]), 1)
        at = tl.where(largest > best, first, at)
        best = tl.maximum(largest, best)
    return s, t, u, q, v, h, shares, mass, best, at


@triton.jit
def first_loads(line, y, way: tl.constexpr):
    """Return the raw logits of the first two blocks and of the target's lane, that lane, and a mask of its classes.

    The mask excludes the target. Lanes are those of an aligned row. If the target is not in the row, this is any lane.
    """
    WIDTH: tl.constexpr = way.block // way.lanes
    source, off, _last, whole, vocabulary = line
    lane = tl.maximum(y, 0) // WIDTH % way.lanes
    k = tl.arange(0, way.blocks * WIDTH)
    classes = k // WIDTH * way.block + lane * WIDTH + k % WIDTH
    inside = (classes < vocabulary) & (classes != y)
    z, ahead = fetch(source, 0, whole, way, "evict_last"), fetch(source, way.block, whole, way, "evict_last")
    return z, ahead, tl.load(source + (off + classes), mask=inside, other=0.0).to(tl.float32), lane, inside


@triton.jit
def _over_lanes(values, off, lane, way: tl.constexpr):
    """Return the sum over all lanes of an aligned row but one."""
    lanes = tl.arange(0, way.lanes)
    if way.skewed:
        values = tl.gather(values, (lanes + off) % way.lanes, 0)
    return tl.sum(tl.where(lanes != lane, values, 0.0), 0)


@triton.jit
def _joined(sums, off, loads, reference, weights, bend, way: tl.constexpr, CAREFUL: tl.constexpr):
    """Return sums over all lanes: s, t and q without the target, the others with it.

    The target's lane is summed again.
    Subtracting the target from a sum would cancel if the target is nearly the whole sum.
    """
    s, t, u, q, v, h, shares, mass, _best, _at = sums
    _z, _ahead, z, lane, inside = loads
    e2 = tl.where(inside, _exponents(z, reference, bend, way, CAREFUL), -float("inf"))
    e = tl.math.exp2(e2)
    rest = _over_lanes(s, off, lane, way) + tl.sum(e, 0)
    below, mixed, squares, level, surprise, all_shares, all_q = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    if way.smoothed:
        below = _over_lanes(u, off, -1, way)
    if way.entropy:
        mixed = _over_lanes(t, off, lane, way) + tl.sum(e * tl.maximum(e2, FLOOR), 0)
    if way.squared:
        squares = _over_lanes(q, off, lane, way) + tl.sum(e * e, 0)
    if way.averaged:
        level = _over_lanes(v, off, -1, way)
    if weights[1] is not None:
        surprise = _over_lanes(h, off, -1, way)
        all_shares, all_q = _over_lanes(shares, off, -1, way), _over_lanes(mass, off, -1, way)
    return rest, below, mixed, squares, level, surprise, all_shares, all_q


@triton.jit
def row_sums(line, loads, y, x_y, weights, bend, way: tl.constexpr):
    """Return m, the sums of a row (`_joined`), its largest key, and the key's class.

    `line` is (row, `offset`, where the last block begins, where the last vector ends, V), with places from the offset.
    `loads` are `first_loads`. Each block is loaded while the previous one is added. Only the first and the last block
    are masked. m is near the largest x of all classes but the target y, or the largest of these and x_y, which is -inf
    if the target is not in the row.
    """
    BLOCK: tl.constexpr = way.block
    LANES: tl.constexpr = way.lanes
    source, off, last, whole, vocabulary = line
    z, ahead, _lane_z, _lane, _others = loads
    classes = tl.arange(0, BLOCK) - off
    inside = (classes >= 0) & (classes < vocabulary) & (classes != y)
    if way.skewed:  # the same classes wherever the row begins
        inside = inside & (classes < BLOCK - way.vector)
    m = finite(tl.max(tl.where(inside, activate(z, bend, way), -float("inf")), 0))
    zero = tl.zeros([LANES], tl.float32)
    nothing = zero, zero, zero, zero, zero, zero, zero, zero, zero - float("inf"), tl.zeros([LANES], tl.int32)
    lanes = _add(nothing, z, 0, line, m, weights, bend, way, way.skewed or way.blocks == 1, False)
    for first in range(BLOCK, last, BLOCK):
        z = ahead
        ahead = fetch(source, first + BLOCK, whole, way, "evict_last")
        lanes = _add(lanes, z, first, line, m, weights, bend, way, False, False)
    if last > 0:
        lanes = _add(lanes, ahead, last, line, m, weights, bend, way, True, False)
    sums = _joined(lanes, off, loads, m, weights, bend, way, way.exact)
    rest = sums[0]
    total = rest + tl.math.exp2(exponent(x_y, m, way.exact))
    fits = (rest >= SMALLEST) & (total < tl.where(m == 0, LARGEST_FROM_0, LARGEST))
    if (fits & (way.exact | (tl.abs(m) < FAR))) == 0:
        peak = tl.full([BLOCK], -float("inf"), tl.float32)
        for first in range(0, last + 1, BLOCK):
            x = activate(fetch(source, first, whole, way, "evict_last"), bend, way)
            classes = first + tl.arange(0, BLOCK) - off
            inside = (classes >= 0) & (classes < vocabulary) & (classes != y)
            peak = tl.maximum(peak, tl.where(inside, x, -float("inf")))
        m = finite(tl.maximum(tl.max(peak, 0), x_y))
        again = nothing
        for first in range(0, last + 1, BLOCK):
            z = fetch(source, first, whole, way, "evict_last")
            again = _add(again, z, first, line, m, weights, bend, way, True, True)
        sums = _joined(again, off, loads, m, weights, bend, way, True)
    top, found = 0.0, 0
    if way.predicted:
        top = tl.max(lanes[8], 0)
        first = tl.min(tl.where(lanes[8] == top, lanes[9], NOWHERE), 0)
        z = fetch(source, first, whole, way, "evict_last")
        classes = first + tl.arange(0, BLOCK) - off
        inside = (classes >= 0) & (classes < vocabulary)
        found = tl.min(tl.where(inside & (order(z, inside, bend, way) == top), classes, NOWHERE), 0)
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
    rows,  # the class weights are those of these classes
    numbers,
    start: "i64",  # index of the first row in `rows.order`, or in the call
    ignore_index: "i64",
    first: "i32",  # the first class of the logits
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
        line = line_of(logits, here, logits_inner, logits_outer, logits_row, skew, 0, width, way)
        loads = first_loads(line, y, way)
        if target_logits is None:
            z_y = tl.load(line[0] + (line[1] + y), mask=owned, other=0.0).to(tl.float32)
        else:
            z_y = tl.where(owned, tl.load(target_logits + here), 0.0)
        nothing = tl.full((), -float("inf"), tl.float32)
        m, found_sums, top, found = row_sums(line, loads, y, nothing, (rows.class_weight, None), bend, way)
        rest, below, mixed, squares, level, _h, _shares, _mass = found_sums
        peak = tl.where(rest == 0, -float("inf"), m)
        found += first
        counted = width.to(tl.float32)
        w_y = tl.where(owned, 1.0, 0.0)
        if rows.class_weight is not None:  # a rank may have none
            w_y = tl.load(rows.class_weight + y, mask=owned, other=0.0)
        weights = counted
        if rows.total_weight is not None:
            weights = tl.load(rows.total_weight)
        below *= LN2
        if way.smoothed:
            own = times(w_y, m - activate(z_y, bend, way, True))
            below = tl.where(own == float("inf"), own, below - own)
        made = rest, below, weights - w_y, mixed * LN2, squares, counted * m - level, counted
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
