"""The fold of a whole row: per-lane sums, and their sum over lanes without the target.

`quick_sums` takes exponentials relative to the largest logit of the row's first block, so it needs no maximum over the
row. If that overflows or underflows, `careful_sums` finds the largest x first. Each lane has the following sums over
its classes, with e = e^(x - m)::

    s = sum e    t = sum e log2 e    u = -sum w log2 e    q = sum e^2    v = sum x

All but s are computed only if they are needed (ENTROPY, SMOOTHED, SQUARED, AVERAGED).

In a row that does not begin at a multiple of 16 bytes (SKEWED), a lane has other classes than in an aligned row. Before
lanes are summed they are rotated back, so that a row's loss has the same bits wherever it begins.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.maths import (
    FLOOR,
    LOG2E,
    activate,
    capped_exponent,
    exponent,
    finite,
    is_exact,
    order,
    quick_exponent,
    times,
)
from xent.backends.triton.kernels.memory import fetch

__all__ = ["careful_sums", "in_lanes", "joined", "lane_of_target", "quick_sums", "turn"]


@triton.jit
def in_lanes(values, LANES: tl.constexpr):
    """Return the sums of a block over neighbouring elements, (LANES,), which one thread holds."""
    return tl.sum(tl.reshape(values, [LANES, values.shape[0] // LANES]), 1)


@triton.jit
def turn(values, off, LANES: tl.constexpr):
    """Rotate the lanes (LANES,) of a row that begins `off` elements after a boundary to those of an aligned row."""
    return tl.gather(values, (tl.arange(0, LANES) + off) % LANES, 0)


@triton.jit
def _exponents(
    z, reference, exact, logit_scale, softcap, CAREFUL: tl.constexpr, QUICK: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Return log2 of e^(x - reference) for raw logits."""
    if (CAPPED and QUICK) and not CAREFUL:
        return capped_exponent(z, logit_scale, softcap, reference * LOG2E, SCALED)
    else:
        x = activate(z, logit_scale, softcap, SCALED, CAPPED, QUICK)
        if CAREFUL:
            return exponent(x, reference, exact)
        else:
            return quick_exponent(x, reference)


@triton.jit
def _terms(e2, ENTROPY: tl.constexpr):
    """Return 2^e2, and with ENTROPY its product with e2."""
    e = tl.math.exp2(e2)
    return e, e * tl.maximum(e2, FLOOR) if ENTROPY else e


@triton.jit
def _add(
    s, t, u, q, v, best, at, z, classes, first, vocabulary, reference, exact, class_weight, logit_scale, softcap,
    BLOCK: tl.constexpr, LANES: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr, CAREFUL: tl.constexpr,
    QUICK: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr,
    SQUARED: tl.constexpr, AVERAGED: tl.constexpr, PREDICTED: tl.constexpr,
):  # fmt: skip
    """Add a block to a row's sums."""
    inside = (classes >= 0) & (classes < vocabulary)
    e2 = _exponents(z, reference, exact, logit_scale, softcap, CAREFUL, QUICK, SCALED, CAPPED)
    if MASKED and CUT:
        e2 = tl.where(inside, e2, -float("inf"))
    e, mixed = _terms(e2, ENTROPY)
    s += in_lanes(e, LANES)
    if ENTROPY:
        t += in_lanes(mixed, LANES)
    if SMOOTHED:
        if class_weight is not None:
            u -= in_lanes(times(tl.load(class_weight + classes, mask=inside, other=0.0), e2), LANES)
        else:
            u -= in_lanes(tl.where(inside, e2, 0.0) if MASKED else e2, LANES)
    if SQUARED:
        q += in_lanes(e * e, LANES)
    if AVERAGED:
        x = activate(z, logit_scale, softcap, SCALED, CAPPED, QUICK)
        v += in_lanes(tl.where(inside, x, 0.0) if MASKED else x, LANES)
    if PREDICTED:
        key = order(z, inside if MASKED else True, logit_scale, SCALED)
        largest = tl.max(tl.reshape(key, [LANES, BLOCK // LANES]), 1)
        at = tl.where(largest > best, first, at)
        best = tl.maximum(largest, best)
    return s, t, u, q, v, best, at


@triton.jit
def quick_sums(
    source, z, ahead, off, last, whole, vocabulary, left_out, class_weight, logit_scale, softcap,
    BLOCK: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr, SKEWED: tl.constexpr,
    RAGGED: tl.constexpr, VECTOR: tl.constexpr, EXACT: tl.constexpr, QUICK: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, SQUARED: tl.constexpr, AVERAGED: tl.constexpr,
    PREDICTED: tl.constexpr,
):  # fmt: skip
    """Return the reference m, whether it is exact, the sums of each lane relative to it, and each lane's largest key.

    m is the largest x of the first block. `z` and `ahead` are the raw logits of the first two blocks. The class
    `left_out` is excluded if it is not None. Only the first and the last block are masked. Each block is loaded while
    the previous one is added.
    """
    nothing = tl.zeros([LANES], tl.float32)
    best = tl.full([LANES], -float("inf"), tl.float32)
    at = tl.zeros([LANES], tl.int32)
    classes = tl.arange(0, BLOCK) - off
    x = activate(z, logit_scale, softcap, SCALED, CAPPED, QUICK)
    seen = x
    if SKEWED:
        seen = tl.where((classes >= 0) & (classes < BLOCK - VECTOR) & (classes < vocabulary), seen, -float("inf"))
    elif BLOCKS == 1:
        seen = tl.where(classes < vocabulary, seen, -float("inf"))
    if left_out is not None:
        seen = tl.where(classes != left_out, seen, -float("inf"))
    m = finite(tl.max(seen, 0))
    exact = is_exact(m, EXACT)
    s, t, u, q, v, best, at = _add(
        nothing, nothing, nothing, nothing, nothing, best, at, z, classes, 0, vocabulary, m, exact, class_weight,
        logit_scale, softcap, BLOCK, LANES, SKEWED or BLOCKS == 1, RAGGED or (CAPPED or SCALED), EXACT, QUICK, SCALED,
        CAPPED, SMOOTHED, ENTROPY, SQUARED, AVERAGED, PREDICTED,
    )  # fmt: skip
    end = last + (BLOCK if WHOLE else 0)
    for first in range(BLOCK, end, BLOCK):
        z = ahead
        ahead = fetch(source, first + BLOCK, whole, BLOCK, VECTOR, "evict_last")
        s, t, u, q, v, best, at = _add(
            s, t, u, q, v, best, at, z, first + tl.arange(0, BLOCK) - off, first, vocabulary, m, exact, class_weight,
            logit_scale, softcap, BLOCK, LANES, False, RAGGED, EXACT, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY,
            SQUARED, AVERAGED, PREDICTED,
        )  # fmt: skip
    if not WHOLE:
        if last > 0:
            s, t, u, q, v, best, at = _add(
                s, t, u, q, v, best, at, ahead, last + tl.arange(0, BLOCK) - off, last, vocabulary, m, exact,
                class_weight, logit_scale, softcap, BLOCK, LANES, True, RAGGED or (CAPPED or SCALED), EXACT, QUICK,
                SCALED, CAPPED, SMOOTHED, ENTROPY, SQUARED, AVERAGED, PREDICTED,
            )  # fmt: skip
    return m, exact, s, t, u, q, v, best, at


@triton.jit
def careful_sums(
    source, off, last, whole, vocabulary, y, x_y, class_weight, logit_scale, softcap,
    BLOCK: tl.constexpr, LANES: tl.constexpr, RAGGED: tl.constexpr, VECTOR: tl.constexpr, EXACT: tl.constexpr,
    QUICK: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr,
    SQUARED: tl.constexpr, AVERAGED: tl.constexpr,
):  # fmt: skip
    """Return m, whether it is exact, and the sums of each lane. m is the largest x of the row."""
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, last + 1, BLOCK):
        z = fetch(source, first, whole, BLOCK, VECTOR, "evict_last")
        classes = first + tl.arange(0, BLOCK) - off
        x = activate(z, logit_scale, softcap, SCALED, CAPPED, QUICK)
        inside = (classes >= 0) & (classes < vocabulary) & (classes != y)
        peak = tl.maximum(peak, tl.where(inside, x, -float("inf")))
    m = finite(tl.maximum(tl.max(peak, 0), x_y))
    exact = is_exact(m, EXACT)
    s = tl.zeros([LANES], tl.float32)
    t = s
    u = s
    q = s
    v = s
    best = s
    at = tl.zeros([LANES], tl.int32)
    for first in range(0, last + 1, BLOCK):
        z = fetch(source, first, whole, BLOCK, VECTOR, "evict_last")
        s, t, u, q, v, _best, _at = _add(
            s, t, u, q, v, best, at, z, first + tl.arange(0, BLOCK) - off, first, vocabulary, m, exact, class_weight,
            logit_scale, softcap, BLOCK, LANES, True, RAGGED or (CAPPED or SCALED), True, QUICK, SCALED, CAPPED,
            SMOOTHED, ENTROPY, SQUARED, AVERAGED, False,
        )  # fmt: skip
    return m, exact, s, t, u, q, v


@triton.jit
def lane_of_target(source, off, y, vocabulary, BLOCK: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the target's lane, the lane's classes, a mask that excludes the target, and their raw logits.

    Lanes are those of an aligned row. If the target is not in the row, this is any lane, with all its classes.
    """
    WIDTH: tl.constexpr = BLOCK // LANES
    lane = tl.maximum(y, 0) // WIDTH % LANES
    k = tl.arange(0, BLOCKS * WIDTH)
    classes = k // WIDTH * BLOCK + lane * WIDTH + k % WIDTH
    inside = (classes < vocabulary) & (classes != y)
    return lane, classes, inside, tl.load(source + (off + classes), mask=inside, other=0.0)


@triton.jit
def _over_lanes(values, off, lane, LANES: tl.constexpr, SKEWED: tl.constexpr):
    """Return the sum over all lanes of an aligned row but one."""
    return tl.sum(tl.where(tl.arange(0, LANES) != lane, turn(values, off, LANES) if SKEWED else values, 0.0), 0)


@triton.jit
def joined(
    s, t, u, q, v, off, lane, classes, inside, z, reference, exact, class_weight, logit_scale, softcap,
    LANES: tl.constexpr, SKEWED: tl.constexpr, CAREFUL: tl.constexpr, QUICK: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, SQUARED: tl.constexpr, AVERAGED: tl.constexpr,
):  # fmt: skip
    """Return the sums over all lanes without the target. Its lane is summed again (`lane_of_target`).

    Subtracting the target from a sum would cancel if the target is nearly the whole sum.
    """
    z = z.to(tl.float32)
    e2 = _exponents(z, reference, exact, logit_scale, softcap, CAREFUL, QUICK, SCALED, CAPPED)
    e2 = tl.where(inside, e2, -float("inf"))
    e, mixed = _terms(e2, ENTROPY)
    total = _over_lanes(s, off, lane, LANES, SKEWED) + tl.sum(e, 0)
    mix = 0.0
    if ENTROPY:
        mix = _over_lanes(t, off, lane, LANES, SKEWED) + tl.sum(mixed, 0)
    below = 0.0
    if SMOOTHED:
        w = tl.where(inside, 1.0, 0.0)
        if class_weight is not None:
            w = tl.load(class_weight + classes, mask=inside, other=0.0)
        below = _over_lanes(u, off, lane, LANES, SKEWED) - tl.sum(times(w, e2), 0)
    squares = 0.0
    if SQUARED:
        squares = _over_lanes(q, off, lane, LANES, SKEWED) + tl.sum(e * e, 0)
    level = 0.0
    if AVERAGED:
        x = tl.where(inside, activate(z, logit_scale, softcap, SCALED, CAPPED, QUICK), 0.0)
        level = _over_lanes(v, off, lane, LANES, SKEWED) + tl.sum(x, 0)
    return total, mix, below, squares, level
