"""The fold of a whole row: per-lane sums, and their sum over lanes without the target.

`_quick_sums` takes exponentials relative to the largest logit of the row's first block, so it needs no maximum over the
row. If that overflows or underflows, `_careful_sums` finds the largest x first. Each lane has the following sums over
its classes, with e = e^(x - m)::

    s = sum e    t = sum e log2 e    u = -sum w log2 e    q = sum e^2    v = sum x

All but s are computed only if they are needed. A lane also has its largest key (`order`) and the first class of that
block.

In a row that does not begin at a multiple of 16 bytes (skewed), a lane has other classes than in an aligned row. Before
lanes are summed they are rotated back, so that a row's loss has the same bits wherever it begins.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.maths import (
    FAR,
    FLOOR,
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
from xent.backends.triton.kernels.memory import fetch

__all__ = ["lane_of_target", "row_sums"]

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
        return capped_exponent(z, bend, reference * LOG2E)
    else:
        x = activate(z, bend, way.quick)
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
    sums, z, first, line, m, class_weight, bend, way: tl.constexpr, MASKED: tl.constexpr, AGAIN: tl.constexpr
):  # fmt: skip
    """Add a block to a row's sums. AGAIN: relative to the largest x, without keys."""
    LANES: tl.constexpr = way.lanes
    WIDTH: tl.constexpr = way.block // way.lanes
    s, t, u, q, v, best, at = sums
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
        if class_weight is not None:
            u -= _in_lanes(times(tl.load(class_weight + classes, mask=inside, other=0.0), e2), LANES)
        else:
            u -= _in_lanes(tl.where(inside, e2, 0.0) if MASKED else e2, LANES)
    if way.squared:
        q += _in_lanes(e * e, LANES)
    if way.averaged:
        x = activate(z, bend, way.quick)
        v += _in_lanes(tl.where(inside, x, 0.0) if MASKED else x, LANES)
    if way.predicted and not AGAIN:
        largest = tl.max(tl.reshape(order(z, inside if MASKED else True, bend), [LANES, WIDTH]), 1)
        at = tl.where(largest > best, first, at)
        best = tl.maximum(largest, best)
    return s, t, u, q, v, best, at


@triton.jit
def _nothing(way: tl.constexpr):
    """Return the sums of no block."""
    LANES: tl.constexpr = way.lanes
    zero = tl.zeros([LANES], tl.float32)
    return zero, zero, zero, zero, zero, zero - float("inf"), tl.zeros([LANES], tl.int32)


@triton.jit
def _quick_sums(line, z, ahead, left_out, class_weight, bend, way: tl.constexpr):
    """Return the reference m, and the sums of each lane relative to it.

    m is the largest x of the first block. `z` and `ahead` are the raw logits of the first two blocks. The class
    `left_out` is excluded if it is not None. Only the first and the last block are masked. Each block is loaded while
    the previous one is added.
    """
    BLOCK: tl.constexpr = way.block
    source, off, last, whole, vocabulary = line
    classes = tl.arange(0, BLOCK) - off
    seen = activate(z, bend, way.quick)
    if way.skewed:
        seen = tl.where((classes >= 0) & (classes < BLOCK - way.vector) & (classes < vocabulary), seen, -float("inf"))
    elif way.blocks == 1:
        seen = tl.where(classes < vocabulary, seen, -float("inf"))
    if left_out is not None:
        seen = tl.where(classes != left_out, seen, -float("inf"))
    m = finite(tl.max(seen, 0))
    FIRST: tl.constexpr = way.skewed or way.blocks == 1
    sums = _add(_nothing(way), z, 0, line, m, class_weight, bend, way, FIRST, False)
    end = last + (BLOCK if way.whole else 0)
    for first in range(BLOCK, end, BLOCK):
        z = ahead
        ahead = fetch(source, first + BLOCK, whole, way, "evict_last")
        sums = _add(sums, z, first, line, m, class_weight, bend, way, False, False)
    if not way.whole:
        if last > 0:
            sums = _add(sums, ahead, last, line, m, class_weight, bend, way, True, False)
    return m, sums


@triton.jit
def _careful_sums(line, y, x_y, class_weight, bend, way: tl.constexpr):
    """Return m, the largest x of the row, and the sums of each lane."""
    BLOCK: tl.constexpr = way.block
    source, off, last, whole, vocabulary = line
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, last + 1, BLOCK):
        x = activate(fetch(source, first, whole, way, "evict_last"), bend, way.quick)
        classes = first + tl.arange(0, BLOCK) - off
        inside = (classes >= 0) & (classes < vocabulary) & (classes != y)
        peak = tl.maximum(peak, tl.where(inside, x, -float("inf")))
    m = finite(tl.maximum(tl.max(peak, 0), x_y))
    sums = _nothing(way)
    for first in range(0, last + 1, BLOCK):
        z = fetch(source, first, whole, way, "evict_last")
        sums = _add(sums, z, first, line, m, class_weight, bend, way, True, True)
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
def _joined(sums, off, target_lane, reference, class_weight, bend, way: tl.constexpr, CAREFUL: tl.constexpr):
    """Return the sums over all lanes without the target. Its lane is summed again (`lane_of_target`).

    Subtracting the target from a sum would cancel if the target is nearly the whole sum.
    """
    s, t, u, q, v, _best, _at = sums
    lane, classes, inside, z = target_lane
    z = z.to(tl.float32)
    e2 = tl.where(inside, _exponents(z, reference, bend, way, CAREFUL), -float("inf"))
    e, mixed = _terms(e2, way.entropy)
    total = _over_lanes(s, off, lane, way) + tl.sum(e, 0)
    mix = 0.0
    if way.entropy:
        mix = _over_lanes(t, off, lane, way) + tl.sum(mixed, 0)
    below = 0.0
    if way.smoothed:
        w = tl.where(inside, 1.0, 0.0)
        if class_weight is not None:
            w = tl.load(class_weight + classes, mask=inside, other=0.0)
        below = _over_lanes(u, off, lane, way) - tl.sum(times(w, e2), 0)
    squares = 0.0
    if way.squared:
        squares = _over_lanes(q, off, lane, way) + tl.sum(e * e, 0)
    level = 0.0
    if way.averaged:
        level = _over_lanes(v, off, lane, way) + tl.sum(tl.where(inside, activate(z, bend, way.quick), 0.0), 0)
    return total, mix, below, squares, level


@triton.jit
def row_sums(
    line, z, ahead, y, x_y, owned, target_lane, class_weight, bend, way: tl.constexpr
):  # fmt: skip
    """Return m, the sums of a row without its target y, its largest key, and the key's class.

    `line` is (row, `offset`, where the last block begins, where the last vector ends, V), with places from the offset.
    With the target's x, m may be that. If x_y is None, m is near the largest x of the others, as sums need that are
    merged with those of other classes. `owned`: whether the target is in the row.
    """
    source, off, _last, whole, vocabulary = line
    left_out = y if x_y is None else None
    m, sums = _quick_sums(line, z, ahead, left_out, class_weight, bend, way)
    rest, mixed, below, squares, level = _joined(sums, off, target_lane, m, class_weight, bend, way, way.exact)
    if x_y is None:
        largest = -float("inf")
        fits = (rest >= SMALLEST_OF_OTHERS) & (rest < LARGEST)
    else:
        largest = tl.where(owned, x_y, -float("inf"))
        total = rest + tl.where(owned, tl.math.exp2(exponent(x_y, m, way.exact)), 0.0)
        least = tl.where(m == 0, SMALLEST_FROM_0, SMALLEST)
        most = tl.where(m == 0, LARGEST_FROM_0, LARGEST)
        fits = (total > least) & (total < most) & (way.exact | (tl.abs(m) < FAR))
    if fits == 0:
        m, again = _careful_sums(line, y, largest, class_weight, bend, way)
        rest, mixed, below, squares, level = _joined(again, off, target_lane, m, class_weight, bend, way, True)
    top = 0.0
    found = 0
    if way.predicted:
        top = tl.max(sums[5], 0)
        first = tl.min(tl.where(sums[5] == top, sums[6], NOWHERE), 0)
        z = fetch(source, first, whole, way, "evict_last")
        ids = first + tl.arange(0, way.block) - off
        inside = (ids >= 0) & (ids < vocabulary)
        found = tl.min(tl.where(inside & (order(z, inside, bend) == top), ids, NOWHERE), 0)
    return m, rest, mixed, below, squares, level, top, found
