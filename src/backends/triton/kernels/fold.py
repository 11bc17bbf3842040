"""The first pass over a row: per-lane sums, their sum over lanes without the target; and its kernel for parts of rows.

`row_sums` takes exponentials relative to the largest logit of the row's first block, or of other classes in the
target's lane if that is the target, so it needs no maximum over the row. If that overflows or underflows, it finds the
largest x and reads the row again. Each lane has the following sums over its classes, with e = e^(x - m). They are named
like the packed sums of `xent.backends.torch.contract`, but in units of log2::

    rest = sum e    below = -sum w log2 e    mixed = sum e log2 e    squares = sum e^2    level = sum x

All but `rest` are computed only if they are needed. With class probabilities q, w are the shares of classes in the loss
(`shares_of`), and there are three sums more::

    surprise = -sum q log2 e    mass = sum w    given = sum q

A lane also has its largest key (`order`) and the first class of that block.

A row may begin at any address (`Way.skewed`). It is then read from the last multiple of 16 bytes before it, `off`
elements earlier, so that a lane has other classes than in an aligned row. Before lanes are summed they are rotated
back: a row's loss has the same bits wherever it begins.

Vectors of 16-bit elements are loaded as pairs, the first in the low half of an int32: widening both
to float32 takes one instruction each. Blocks that are loaded ahead are float32 too. If they were kept as pairs, the
compiler would load them into the registers of the block before, and so not before that block is used.

`fold_kernel` computes the packed sums of rows over the classes of one rank or tile. The target is only in its own
column, as its raw logit. Exponents are (x - reference) * log2(e), with the subtraction first, for 16-bit logits too
(`Way.exact`). References differ between ranks and tiles, so the rounding error of reference * log2(e) would not cancel.
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
    load,
    order,
    position,
    quick_exponent,
    row_at,
    times,
)
from xent.backends.triton.kernels.sums import check_of, column, larger, load_sums, owner, plus, put, rebased
from xent.backends.triton.launches import kernel

__all__ = ["fetch", "fill", "first_loads", "fold_kernel", "line_of", "row_sums", "shares_of"]

NO_BFLOAT16 = tl.constexpr(-0x007F0080)  # a pair of -inf
NO_FLOAT16 = tl.constexpr(-0x03FF0400)
HIGH = tl.constexpr(-0x10000)  # the bits of a pair's second element

# Between these bounds, sums and sums of squares have the full precision of float32, and log(sum + e^(target - m)) does
# not cancel, whichever term is larger.
SMALLEST = tl.constexpr(0.5)
LARGEST = tl.constexpr(1e18)
# If the first block is all -inf, m is 0, which may be far from every logit. The entropy is then a difference of numbers
# as large as the sum's logarithm.
LARGEST_FROM_0 = tl.constexpr(1048576.0)


@triton.jit
def line_of(tensor, local_row, inner, outer, stride, skew, cut, size, way: tl.constexpr):
    """Return a row's `size` classes from `cut` on, as kernels of vectors have it.

    These are a pointer to a multiple of 16 bytes, if there are vectors; the first class's distance from it in elements;
    where the last block begins and where the last vector ends, counted from the pointer; and `size`.
    """
    start = position(local_row, inner, outer, stride, way.grouped)
    off = 0
    if way.skewed:
        off = ((skew + start) % way.vector).to(tl.int32)
    row = tensor + (start + (cut - off))
    row = tl.multiple_of(row, 16) if way.vector > 1 else row
    whole = (size + tl.where(size > 0, off, 0) + way.vector - 1) // way.vector * way.vector  # 0 if there is no class
    return row, off, (size + off - 1) // way.block * way.block, whole, size


@triton.jit
def fetch(row, first, whole, way: tl.constexpr, POLICY: tl.constexpr):
    """Load a block of a row as float32, in the whole vectors that begin before `whole`. Other elements are -inf."""
    BLOCK: tl.constexpr = way.block
    if way.vector == 8:  # 16-bit elements
        NOTHING: tl.constexpr = NO_BFLOAT16 if row.dtype.element_ty == tl.bfloat16 else NO_FLOAT16
        pairs = tl.multiple_of(row.to(tl.pointer_type(tl.int32)), 16) + first // 2
        lanes = tl.arange(0, BLOCK // 2)
        words = tl.load(pairs + lanes, mask=lanes < (whole - first) // 2, other=NOTHING, eviction_policy=POLICY)
        if row.dtype.element_ty == tl.bfloat16:
            low = (words << 16).to(tl.float32, bitcast=True)
            high = (words & HIGH).to(tl.float32, bitcast=True)
        else:
            low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), [BLOCK])
    else:
        lanes = tl.arange(0, BLOCK)
        mask = lanes < whole - first
        return tl.load(row + first + lanes, mask=mask, other=-float("inf"), eviction_policy=POLICY).to(tl.float32)


@triton.jit
def shares_of(weights, classes, inside):
    """Return q and w ((1-e) q + e/V) of classes with probabilities; w twice without.

    `weights` are the class weights or None, and the probabilities of a row or None, their stride, 1-e and e/V.
    """
    share = 1.0 if weights[0] is None else tl.load(weights[0] + classes, mask=inside, other=0.0)
    q = share
    if weights[1] is not None:
        q = tl.load(weights[1] + classes.to(tl.int64) * weights[2], mask=inside, other=0.0).to(tl.float32)
        share = tl.where(inside, (weights[3] * q + weights[4]) * share, 0.0)
    return q, share


@triton.jit
def fill(row, value, start, stop, way: tl.constexpr):
    """Store one number to classes [start, stop) of a row, after all threads have finished their earlier work."""
    BLOCK: tl.constexpr = way.block
    if not way.ragged:
        stop = stop // way.vector * way.vector  # no change, but tells the compiler that it is a multiple
    tl.debug_barrier()
    for first in range(start, stop, BLOCK):
        classes = first + tl.arange(0, BLOCK)
        filled = tl.zeros([BLOCK], tl.float32) + value
        tl.store(row + classes, filled.to(row.dtype.element_ty), mask=classes < stop, cache_modifier=".cs")
    tl.debug_barrier()


@triton.jit
def _in_lanes(terms, LANES: tl.constexpr):
    """Return the sums of a block over neighbouring elements, (LANES,), which one thread holds."""
    return tl.sum(tl.reshape(terms, [LANES, terms.shape[0] // LANES]), 1)


@triton.jit
def _exponents(z, reference, activation, way: tl.constexpr, CAREFUL: tl.constexpr):
    """Return log2 of e^(x - reference) for raw logits."""
    if CAREFUL:
        return exponent(activate(z, activation, way), reference, way.exact)
    else:
        return quick_exponent(z, activation, reference * LOG2E, way)


@triton.jit
def _add(
    sums, z, first, line, m, weights, activation, way: tl.constexpr, MASKED: tl.constexpr, AGAIN: tl.constexpr
):  # fmt: skip
    """Add a block to a row's sums. AGAIN: relative to the largest x, without keys."""
    LANES: tl.constexpr = way.block if way.skewed else way.block // way.vector
    rest, below, mixed, squares, level, surprise, mass, all_q, best, at = sums
    _source, off, _last, _whole, vocabulary = line
    classes = first + tl.arange(0, way.block) - off
    inside = (classes >= 0) & (classes < vocabulary)
    e2 = _exponents(z, m, activation, way, AGAIN or way.exact)
    # Beyond an aligned row, logits are -inf. With a scale <= 0 the sums are infinite or NaN, and the row is read AGAIN.
    if MASKED and (way.ragged or (way.capped or (way.predicted or AGAIN))):
        e2 = tl.where(inside, e2, -float("inf"))
    e = tl.math.exp2(e2)
    added = _in_lanes(e, LANES)
    rest += added
    if way.entropy:
        mixed += _in_lanes(e * tl.maximum(e2, FLOOR), LANES)
    if way.smoothed:
        if weights[0] is not None or weights[1] is not None:
            q, share = shares_of(weights, classes, inside)
            below -= _in_lanes(times(share, e2), LANES)
            if weights[1] is not None:
                surprise -= _in_lanes(times(q, e2), LANES)
                mass += _in_lanes(share, LANES)
                all_q += _in_lanes(q, LANES)
        else:
            below -= _in_lanes(tl.where(inside, e2, 0.0) if MASKED else e2, LANES)
    if way.squared:
        squares += _in_lanes(e * e, LANES)
    if way.averaged:
        x = activate(z, activation, way)
        level += _in_lanes(tl.where(inside, x, 0.0) if MASKED else x, LANES)
    if way.predicted and not AGAIN:
        key = order(z, activation, way)
        key = tl.where(inside, key, -float("inf")) if MASKED else key
        largest = tl.max(tl.reshape(key, [LANES, way.block // LANES]), 1)
        largest = tl.where(added != added, float("inf"), largest)  # NaN is largest
        at = tl.where(largest > best, first, at)
        best = tl.maximum(largest, best)
    return rest, below, mixed, squares, level, surprise, mass, all_q, best, at


@triton.jit
def first_loads(line, y, way: tl.constexpr):
    """Return the raw logits of the first two blocks and of the target's lane, that lane, and a mask of its classes.

    The mask excludes the target. Lanes are those of an aligned row. If the target is not in the row, this is any lane.
    """
    WIDTH: tl.constexpr = 1 if way.skewed else way.vector
    source, off, _last, whole, vocabulary = line
    lane = tl.maximum(y, 0) // WIDTH % (way.block // WIDTH)
    k = tl.arange(0, way.blocks * WIDTH)
    classes = k // WIDTH * way.block + lane * WIDTH + k % WIDTH
    inside = (classes < vocabulary) & (classes != y)
    z, ahead = fetch(source, 0, whole, way, "evict_last"), fetch(source, way.block, whole, way, "evict_last")
    return z, ahead, tl.load(source + (off + classes), mask=inside, other=0.0).to(tl.float32), lane, inside


@triton.jit
def _over_lanes(per_lane, off, lane, way: tl.constexpr):
    """Return the sum over all lanes of an aligned row but one."""
    lanes = tl.arange(0, per_lane.shape[0])
    if way.skewed:
        per_lane = tl.gather(per_lane, (lanes + off) % per_lane.shape[0], 0)
    return tl.sum(tl.where(lanes != lane, per_lane, 0.0), 0)


@triton.jit
def _joined(sums, off, loads, reference, weights, activation, way: tl.constexpr, CAREFUL: tl.constexpr):
    """Return sums over all lanes: rest, mixed and squares without the target, the others with it.

    The target's lane is summed again.
    Subtracting the target from a sum would cancel if the target is nearly the whole sum.
    """
    rest, below, mixed, squares, level, surprise, mass, all_q, _best, _at = sums
    _z, _ahead, z, lane, inside = loads
    e2 = tl.where(inside, _exponents(z, reference, activation, way, CAREFUL), -float("inf"))
    e = tl.math.exp2(e2)
    return (
        _over_lanes(rest, off, lane, way) + tl.sum(e, 0),
        _over_lanes(below, off, -1, way) if way.smoothed else 0.0,
        _over_lanes(mixed, off, lane, way) + tl.sum(e * tl.maximum(e2, FLOOR), 0) if way.entropy else 0.0,
        _over_lanes(squares, off, lane, way) + tl.sum(e * e, 0) if way.squared else 0.0,
        _over_lanes(level, off, -1, way) if way.averaged else 0.0,
        0.0 if weights[1] is None else _over_lanes(surprise, off, -1, way),
        0.0 if weights[1] is None else _over_lanes(mass, off, -1, way),
        0.0 if weights[1] is None else _over_lanes(all_q, off, -1, way),
    )


@triton.jit
def row_sums(line, loads, y, x_y, weights, activation, way: tl.constexpr):
    """Return m, the sums of a row (`_joined`), its largest key, and the key's class.

    `line` is (row, `offset`, where the last block begins, where the last vector ends, V), with places from the offset.
    `loads` are `first_loads`. Each block is loaded while the previous one is added. Only the first and the last block
    are masked. m is near the largest x of all classes but the target y, or the largest of these and x_y, which is -inf
    if the target is not in the row.
    """
    BLOCK: tl.constexpr = way.block
    LANES: tl.constexpr = way.block if way.skewed else way.block // way.vector
    source, off, last, whole, vocabulary = line
    z, ahead, lane_z, _lane, others = loads
    seen = activate(z, activation, way)
    if way.skewed or way.blocks == 1:
        classes = tl.arange(0, BLOCK) - off
        inside = (classes >= 0) & (classes < vocabulary)
        if way.skewed:  # the same classes wherever the row begins
            inside = inside & (classes < BLOCK - way.vector)
        seen = tl.where(inside, seen, -float("inf"))
    # If the target is the largest, take another class of its lane. Indices of classes, to leave out the target alone,
    # would stay in registers during the loop, and its loads would start late.
    top = tl.max(seen, 0)
    near = tl.max(tl.where(others, activate(lane_z, activation, way), -float("inf")), 0)
    m = finite(tl.where(x_y < top - 1, top, near))
    zero = tl.zeros([LANES], tl.float32)
    nothing = zero, zero, zero, zero, zero, zero, zero, zero, zero - float("inf"), tl.zeros([LANES], tl.int32)
    masked: tl.constexpr = way.skewed or (way.blocks == 1 or way.vector == 1)
    lanes = _add(nothing, z, 0, line, m, weights, activation, way, masked, False)
    for first in range(BLOCK, last, BLOCK):
        z = ahead
        ahead = fetch(source, first + BLOCK, whole, way, "evict_last")
        lanes = _add(lanes, z, first, line, m, weights, activation, way, False, False)
    if last > 0:
        lanes = _add(lanes, ahead, last, line, m, weights, activation, way, True, False)
    sums = _joined(lanes, off, loads, m, weights, activation, way, way.exact)
    rest = sums[0]
    total = rest + tl.math.exp2(exponent(x_y, m, way.exact))
    fits = (rest >= SMALLEST) & (total < tl.where(m == 0, LARGEST_FROM_0, LARGEST))
    if (fits & (way.exact | (tl.abs(m) < FAR))) == 0:
        peak = tl.full([BLOCK], -float("inf"), tl.float32)
        for first in range(0, last + 1, BLOCK):
            x = activate(fetch(source, first, whole, way, "evict_last"), activation, way)
            classes = first + tl.arange(0, BLOCK) - off
            inside = (classes >= 0) & (classes < vocabulary) & (classes != y)
            peak = tl.maximum(peak, tl.where(inside, x, -float("inf")))
        m = finite(tl.maximum(tl.max(peak, 0), x_y))
        again = nothing
        for first in range(0, last + 1, BLOCK):
            z = fetch(source, first, whole, way, "evict_last")
            again = _add(again, z, first, line, m, weights, activation, way, True, True)
        sums = _joined(again, off, loads, m, weights, activation, way, True)
    top, top_class = 0.0, 0
    if way.predicted:
        top = tl.max(lanes[8], 0)
        first = tl.min(tl.where(lanes[8] == top, lanes[9], NOWHERE), 0) // BLOCK * BLOCK
        z = fetch(source, first, whole, way, "evict_last")
        classes = first + tl.arange(0, BLOCK) - off
        inside = (classes >= 0) & (classes < vocabulary)
        top_class = tl.min(tl.where(inside & ((order(z, activation, way) == top) | (z != z)), classes, NOWHERE), 0)
    return m, sums, top, top_class


@kernel
def fold_kernel(
    logits,  # rows at position(row, inner, outer, stride)
    logits_inner: "i64",
    logits_outer: "i64",
    logits_row: "i64",
    skew: "i64",  # offset of `logits` from a multiple of 16 bytes, in elements
    sums,  # (K, R) float32, rows `sums_stride` apart
    sums_stride: "i64",
    target_logits,  # (R,) float32 or None: replace the targets' raw logits
    input_checks,  # (R,) int32 or None: checksums of the hidden states
    rows,  # the class weights are those of these classes
    numbers,
    start: "i64",  # index of the first row in `rows.order`, or in the call
    ignore_index: "i64",
    first: "i32",  # the first class of the logits
    width: "i32",  # the number of classes
    vocabulary: "i32",
    range_check: "i32",  # of the classes of this rank
    adds: "i32",  # whether to merge the sums into those that are there
    columns: tl.constexpr,  # see `Columns`
    way: tl.constexpr,  # see `Way`
):
    """Write the sums of one row."""
    local_row = tl.program_id(0).to(tl.int64)
    row = row_at(start + local_row, None, rows)
    owned, y, w_y, a, ignored = owner(row, None, rows, ignore_index, first, width, vocabulary)
    checks = 0.0, 0.0
    if columns.check >= 0:
        check = check_of(row, local_row, ignored, rows, input_checks)
        checks = check.to(tl.float32, bitcast=True), range_check.to(tl.float32, bitcast=True)
    place = sums + local_row
    if (ignored | ((a == 0) & (numbers.all_rows == 0))) != 0:
        least = -float("inf")
        put(
            place, sums_stride, None, (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, least, 0.0, 0.0, least, 0.0) + checks, columns
        )
    else:
        line = line_of(logits, local_row, logits_inner, logits_outer, logits_row, skew, 0, width, way)
        loads = first_loads(line, y, way)
        if target_logits is None:
            z_y = tl.load(line[0] + (line[1] + y), mask=owned, other=0.0).to(tl.float32)
        else:
            z_y = tl.where(owned, tl.load(target_logits + local_row), 0.0)
        activation = activation_of(row, None, rows, numbers)
        nothing = tl.full((), -float("inf"), tl.float32)
        weights = rows.class_weight if way.smoothed else None, None
        m, sums_of_row, top, top_class = row_sums(line, loads, y, nothing, weights, activation, way)
        rest, below, mixed, squares, level, _surprise, _mass, _all_q = sums_of_row
        peak = tl.where(rest == 0, -float("inf"), m)
        top_class += first
        counted = width.to(tl.float32)
        total_weight = counted
        if rows.total_weight is not None:
            total_weight = tl.load(rows.total_weight)
        below *= LN2
        if way.smoothed:
            own = times(w_y, m - activate(z_y, activation, way, True))
            below = tl.where(own == float("inf"), own, below - own)
        packed = rest, below, total_weight - w_y, mixed * LN2, squares, counted * m - level, counted
        there, least = adds != 0, -float("inf")
        other_peak = load(place + columns.peak * sums_stride, there, least)
        reference = finite(tl.maximum(peak, other_peak))
        packed = plus(rebased(reference, peak, packed), load_sums(place, sums_stride, there, reference, columns))
        peak = tl.maximum(peak, other_peak)
        z_y += column(place, sums_stride, there, columns.target)
        w_y += column(place, sums_stride, there, columns.row_weight)
        if way.predicted:
            other = column(place, sums_stride, there, columns.place).to(tl.int32, bitcast=True)
            other_key = load(place + columns.key * sums_stride, there, least)
            top, top_class = larger(other_key, tl.where(there, other, NOWHERE), top, top_class)
        packed += (peak, z_y, w_y, top, top_class.to(tl.float32, bitcast=True)) + checks
        put(place, sums_stride, None, packed, columns)
