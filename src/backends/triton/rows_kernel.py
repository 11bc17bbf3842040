"""Loss, statistics and gradient of whole rows in one launch, a program a row: fold, finish, gradient.

The first look at a row adds up exponentials relative to the largest logit of its first block, which needs no maximum
over the row. Where that overflows or vanishes a careful look finds the largest first. The second look, which writes the
gradient, begins at the row's end, which the caches still hold. Masks are needed in the first and the last block and in
that of the target alone; the target's own gradient is written after all others.

Rows that begin off the boundaries of 16 bytes (SKEWED) are read from the boundary before, so that loads and stores keep
their width. A lane then holds other classes than in an aligned row. Before the lanes are added up they are turned back,
so that a row's loss has the same bits wherever the row begins.
"""

import triton
import triton.language as tl

from xent.backends.triton.launch import kernel
from xent.backends.triton.maths import FAR, LN2, LOG2E, activate, exponent, finite, is_exact, order, slope, times
from xent.backends.triton.row_algebra import coefficients, losses, position, row_facts

__all__ = [
    "clear",
    "fetch",
    "gradient_block",
    "in_lanes",
    "reduce_rows",
    "rows_kernel",
    "store",
    "target_gradient",
    "turn",
]

# Sums within these are as exact as float32 has them.
SMALLEST = tl.constexpr(1e-30)
LARGEST = tl.constexpr(1e30)
# Where e^(x - m) has this exponent it is 0; keeps 0 * inf out of sums.
FLOOR = tl.constexpr(-300.0)
# References up to this may take the gradient's factor into the exponent of 16-bit logits.
NEAR = tl.constexpr(512.0)
NOWHERE = tl.constexpr(2147483647)


@triton.jit
def fetch(row, first, whole, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Return a block of a row as it is in memory, in the whole vectors that begin before `whole`; -inf elsewhere."""
    lanes = first + tl.arange(0, BLOCK)
    return tl.load(row + lanes, mask=lanes < whole, other=-float("inf"), eviction_policy=POLICY)


@triton.jit
def store(
    row, first, g, skew, vocabulary,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write a block of a row: in whole vectors, and what is left of a RAGGED row element by element."""
    lanes = first + tl.arange(0, BLOCK)
    g = g.to(row.dtype.element_ty)
    if MASKED:
        begin = (skew + VECTOR - 1) // VECTOR * VECTOR if RAGGED else 0
        end = (vocabulary + skew) // VECTOR * VECTOR
        tl.store(row + lanes, g, mask=(lanes >= begin) & (lanes < end), cache_modifier=".cs")
        if RAGGED:
            edge = (lanes >= skew) & (lanes < vocabulary + skew) & ((lanes < begin) | (lanes >= end))
            tl.store(row + lanes, g, mask=edge, cache_modifier=".cs")
    else:
        tl.store(row + lanes, g, cache_modifier=".cs")


@triton.jit
def in_lanes(values, LANES: tl.constexpr):
    """Return the sums of a block over neighbours, (LANES,), which one thread holds."""
    return tl.sum(tl.reshape(values, [LANES, values.shape[0] // LANES]), 1)


@triton.jit
def turn(values, off, LANES: tl.constexpr):
    """Return lanes (LANES,) of a row that begins `off` elements behind a boundary as those of one that begins there."""
    return tl.gather(values, (tl.arange(0, LANES) + off) % LANES, 0)


@triton.jit
def _terms(x, reference, exact, CAREFUL: tl.constexpr, ENTROPY: tl.constexpr):
    """Return the exponent, e^(x - reference), and with ENTROPY e^(x - reference) times the exponent, else 0."""
    if CAREFUL:
        e2 = exponent(x, reference, exact)
    else:
        e2 = x * LOG2E - reference * LOG2E
    e = tl.math.exp2(e2)
    return e2, e, e * tl.maximum(e2, FLOOR) if ENTROPY else e


@triton.jit
def _add(
    s, t, u, best, at, z, classes, first, vocabulary, reference, exact, class_weight, logit_scale, softcap,
    BLOCK: tl.constexpr, LANES: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr, CAREFUL: tl.constexpr,
    QUICK: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr,
    PREDICTED: tl.constexpr,
):  # fmt: skip
    """Add a block to a row's sums."""
    x = activate(z, logit_scale, softcap, SCALED, CAPPED, QUICK)
    inside = (classes >= 0) & (classes < vocabulary)
    if MASKED and CUT:
        x = tl.where(inside, x, -float("inf"))
    e2, e, mixed = _terms(x, reference, exact, CAREFUL, ENTROPY)
    s += in_lanes(e, LANES)
    if ENTROPY:
        t += in_lanes(mixed, LANES)
    if SMOOTHED:
        if class_weight is not None:
            u -= in_lanes(times(tl.load(class_weight + classes, mask=inside, other=0.0), e2), LANES)
        else:
            u -= in_lanes(tl.where(inside, e2, 0.0) if MASKED else e2, LANES)
    if PREDICTED:
        key = order(z, inside if MASKED else True, logit_scale)
        largest = tl.max(tl.reshape(key, [LANES, BLOCK // LANES]), 1)
        at = tl.where(largest > best, first, at)
        best = tl.maximum(largest, best)
    return s, t, u, best, at


@triton.jit
def _lane_of_target(source, off, y, vocabulary, BLOCK: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the lane that the target is in, and that lane's logits without the target, -inf in its place.

    Lanes are those of rows that begin on a boundary.
    """
    WIDTH: tl.constexpr = BLOCK // LANES
    lane = y // WIDTH % LANES
    k = tl.arange(0, BLOCKS * WIDTH)
    classes = k // WIDTH * BLOCK + lane * WIDTH + k % WIDTH
    inside = (classes < vocabulary) & (classes != y)
    return lane, inside, tl.load(source + (off + classes), mask=inside, other=0.0)


@triton.jit
def _without_target(
    s, t, lane, inside, z, reference, exact, logit_scale, softcap,
    LANES: tl.constexpr, CAREFUL: tl.constexpr, QUICK: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
):  # fmt: skip
    """Return the sums of all lanes, with that of the target added up anew without it, from `_lane_of_target`.

    To subtract the target would leave rounding errors of the size of what is left, where it is nearly all of the sum.
    """
    x = activate(z.to(tl.float32), logit_scale, softcap, SCALED, CAPPED, QUICK)
    _e2, e, mixed = _terms(tl.where(inside, x, -float("inf")), reference, exact, CAREFUL, ENTROPY)
    others = tl.arange(0, LANES) != lane
    sums = tl.sum(tl.where(others, s, 0.0), 0) + tl.sum(e, 0)
    if ENTROPY:
        return sums, tl.sum(tl.where(others, t, 0.0), 0) + tl.sum(mixed, 0)
    else:
        return sums, 0.0


@triton.jit
def gradient_block(
    z, classes, vocabulary, reference, exact, factor, delta, class_weight, logit_scale, softcap,
    CAREFUL: tl.constexpr, QUICK: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
    FOLDED: tl.constexpr,
):  # fmt: skip
    """Return the gradient of a block of raw logits but for the target: e^(x - reference) factor - delta w, times dx/dz.

    FOLDED: `reference` is already log2(e) m - log2(factor), in units of log2.
    """
    x = activate(z, logit_scale, softcap, SCALED, CAPPED, QUICK)
    if FOLDED:
        g = tl.math.exp2(x * LOG2E - reference)
    elif CAREFUL:
        g = tl.math.exp2(exponent(x, reference, exact)) * factor
    else:
        g = tl.math.exp2(x * LOG2E - reference * LOG2E) * factor
    if SMOOTHED:
        if class_weight is not None:
            inside = (classes >= 0) & (classes < vocabulary)
            g -= delta * tl.load(class_weight + classes, mask=inside, other=0.0)
        else:
            g -= delta
    if CAPPED or SCALED:
        g *= slope(z, logit_scale, softcap, SCALED, CAPPED, QUICK)
    return g


@triton.jit
def target_gradient(
    z_y, others, total, e_y, gamma, excess, delta, w_y, logit_scale, softcap,
    SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the target's raw logit."""
    g = times(excess, e_y / total) - gamma * (others / total) - delta * w_y
    if CAPPED or SCALED:
        g *= slope(z_y, logit_scale, softcap, SCALED, CAPPED, False)
    return g


@triton.jit
def clear(place, off, last, vocabulary, BLOCK: tl.constexpr, RAGGED: tl.constexpr, VECTOR: tl.constexpr):
    """Write a gradient of zeros."""
    for first in range(0, last + 1, BLOCK):
        store(place, first, tl.zeros([BLOCK], tl.float32), off, vocabulary, BLOCK, True, RAGGED, VECTOR)


@triton.jit
def _write(
    source, place, off, last, vocabulary, whole, reference, exact, factor, delta, class_weight, logit_scale, softcap,
    BLOCK: tl.constexpr, RAGGED: tl.constexpr, VECTOR: tl.constexpr, SKEWED: tl.constexpr, WHOLE: tl.constexpr,
    CAREFUL: tl.constexpr, QUICK: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
    FOLDED: tl.constexpr,
):  # fmt: skip
    """Write a row's gradient, from its end."""
    if not WHOLE:
        g = gradient_block(
            fetch(source, last, whole, BLOCK, "evict_first").to(tl.float32), last + tl.arange(0, BLOCK) - off,
            vocabulary, reference, exact, factor, delta, class_weight, logit_scale, softcap,
            CAREFUL, QUICK, SCALED, CAPPED, SMOOTHED, FOLDED,
        )  # fmt: skip
        store(place, last, g, off, vocabulary, BLOCK, True, RAGGED, VECTOR)
    blocks = last // BLOCK + (1 if WHOLE else 0)
    least = 1 if SKEWED else 0
    for back in range(least, blocks):
        first = (blocks - 1 - back + least) * BLOCK
        g = gradient_block(
            fetch(source, first, first + BLOCK, BLOCK, "evict_first").to(tl.float32),
            first + tl.arange(0, BLOCK) - off, vocabulary, reference, exact, factor, delta, class_weight, logit_scale,
            softcap, CAREFUL, QUICK, SCALED, CAPPED, SMOOTHED, FOLDED,
        )  # fmt: skip
        store(place, first, g, off, vocabulary, BLOCK, False, RAGGED, VECTOR)
    if SKEWED:
        if last > 0:
            g = gradient_block(
                fetch(source, 0, BLOCK, BLOCK, "evict_first").to(tl.float32), tl.arange(0, BLOCK) - off, vocabulary,
                reference, exact, factor, delta, class_weight, logit_scale, softcap,
                CAREFUL, QUICK, SCALED, CAPPED, SMOOTHED, FOLDED,
            )  # fmt: skip
            store(place, 0, g, off, vocabulary, BLOCK, True, RAGGED, VECTOR)


@triton.jit
def _ticket(counter):
    """Return how many programs had stored their row's loss before this one, which has."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1.0, sem="acq_rel")


@triton.jit
def reduce_rows(values, count, divisor, BLOCK: tl.constexpr):
    """Return the sum of (count,) values over the divisor, 0 where that is 0; None divides by nothing."""
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        sums += tl.load(values + rows, mask=rows < count, other=0.0, cache_modifier=".cg")
    found = tl.sum(sums, 0)
    if divisor is not None:
        d = tl.load(divisor)
        found = tl.where(d == 0, 0.0, tl.div_rn(found, tl.where(d == 0, 1.0, d)))
    return found


@kernel
def rows_kernel(
    logits,  # rows at position(row, inner, outer_stride, row_stride)
    logits_inner: "i64",
    logits_outer: "i64",
    logits_row: "i64",
    skew: "i64",  # elements by which `logits` lies behind a boundary of 16 bytes
    grad,  # None, or where the gradient goes, which may be the logits; off the boundaries as they are
    grad_inner: "i64",
    grad_outer: "i64",
    grad_row: "i64",
    order_of_rows,  # (N,) int64, the rows in the order in which they are computed, or None
    start: "i64",  # which of them is the first here
    target,  # (N,) integers, or None for probabilities
    sample_weight,  # (N,) or None
    class_weight,  # (V,) float32 or None
    class_weight_total,  # () float32 or None
    target_logits,  # (R,) float32 or None: take the place of the targets' raw logits
    upstream,  # (N,) or None
    upstream_stride: "i64",
    scratch,  # float32: D, 1 / D (0 for D = 0), what a gradient still lacks, programs that are done; or None
    loss,  # (N,) float32, like all results
    norm,  # (3, N): m, others, total; or None
    lse,
    nll,
    entropy,
    predictions,  # int64
    hits,  # 1 where the prediction is the target
    z_term,
    total_loss,  # () float32, with REDUCED
    count: "i64",  # N
    length: "i64",
    shift: "i64",
    ignore_index: "i64",
    vocabulary: "i32",
    keep: "fp32",  # 1 - e
    spread: "fp32",  # e / V
    z_loss: "fp32",
    softcap: "fp32",
    logit_scale: "fp32",
    SHIFTED: tl.constexpr,
    GROUPED: tl.constexpr,  # rows of a tensor lie in groups
    MEAN: tl.constexpr,
    REDUCED: tl.constexpr,  # the last program adds up the losses
    ALL_ROWS: tl.constexpr,  # rows of weight 0 are due for their statistics
    SKEWED: tl.constexpr,  # rows may begin off boundaries
    RAGGED: tl.constexpr,  # rows may begin or end off boundaries
    VECTOR: tl.constexpr,  # elements of 16 bytes; 1 where logits and gradient do not lie alike
    WHOLE: tl.constexpr,  # rows are whole blocks
    EXACT: tl.constexpr,
    QUICK: tl.constexpr,
    FOLDS: tl.constexpr,  # the gradient's factor may go into the exponent
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,  # sums of a row that are kept apart
    BLOCKS: tl.constexpr,  # a power of two, and at least as many as a row that begins on a boundary has
):
    """See the module's docstring."""
    ENTROPY: tl.constexpr = entropy is not None
    PREDICTED: tl.constexpr = (predictions is not None) or (hits is not None)
    here = tl.program_id(0).to(tl.int64)
    row = start + here
    if order_of_rows is not None:
        row = tl.load(order_of_rows + row)
    y, a, w_y, ignored, invalid = row_facts(
        row, row < count, target, sample_weight, class_weight, length, shift, ignore_index, vocabulary, SHIFTED, False
    )
    y = y.to(tl.int32)
    inverse = 1.0
    if MEAN:
        inverse = tl.load(scratch + 1)
    dead = ((a == 0) | (inverse == 0)) & ~invalid
    r = tl.where(invalid, float("nan"), a * inverse)
    if upstream is not None:
        r *= tl.load(upstream + row * upstream_stride).to(tl.float32)
    a = tl.where(invalid, float("nan"), a)
    begin = position(here, logits_inner, logits_outer, logits_row, GROUPED)
    off = 0
    if SKEWED:
        off = ((skew + begin) % VECTOR).to(tl.int32)
    source = tl.multiple_of(logits + (begin - off), 16) if VECTOR > 1 else logits + begin
    last = (vocabulary + off - 1) // BLOCK * BLOCK  # where the last block begins
    whole = (vocabulary + off + VECTOR - 1) // VECTOR * VECTOR  # where the last vector ends
    if grad is not None:
        place = grad + (position(here, grad_inner, grad_outer, grad_row, GROUPED) - off)
        if VECTOR > 1:
            place = tl.multiple_of(place, 16)

    ticket = 0.0
    if (ignored if ALL_ROWS else dead) != 0:
        tl.store(loss + row, 0.0)
        if REDUCED:
            ticket = _ticket(scratch + 3)
        if norm is not None:
            tl.store(norm + row, 0.0)
            tl.store(norm + count + row, 0.0)
            tl.store(norm + 2 * count + row, 1.0)
        if lse is not None:
            tl.store(lse + row, 0.0)
        if nll is not None:
            tl.store(nll + row, 0.0)
        if entropy is not None:
            tl.store(entropy + row, 0.0)
        if predictions is not None:
            tl.store(predictions + row, -1)
        if hits is not None:
            tl.store(hits + row, 0.0)
        if z_term is not None:
            tl.store(z_term + row, 0.0)
        if grad is not None:
            clear(place, off, last, vocabulary, BLOCK, RAGGED, VECTOR)
    else:
        if target_logits is None:
            z_y = tl.load(logits + begin + y).to(tl.float32)
        else:
            z_y = tl.load(target_logits + here)
        x_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED, False)

        lane, in_lane, z_lane = _lane_of_target(source, off, y, vocabulary, BLOCK, LANES, BLOCKS)

        # Fold: the first block gives the reference.
        nothing = tl.zeros([LANES], tl.float32)
        best = tl.full([LANES], -float("inf"), tl.float32)
        at = tl.zeros([LANES], tl.int32)
        z = fetch(source, 0, whole, BLOCK, "evict_last").to(tl.float32)
        classes = tl.arange(0, BLOCK) - off
        seen = classes < vocabulary
        if SKEWED:
            seen = seen & (classes >= 0) & (classes < BLOCK - VECTOR)
        x = activate(z, logit_scale, softcap, SCALED, CAPPED, QUICK)
        m = finite(tl.max(tl.where(seen, x, -float("inf")), 0))
        exact = is_exact(m, EXACT)
        s, t, u, best, at = _add(
            nothing, nothing, nothing, best, at, z, classes, 0, vocabulary, m, exact, class_weight, logit_scale,
            softcap, BLOCK, LANES, SKEWED or BLOCKS == 1, RAGGED or (CAPPED or SCALED), EXACT, QUICK, SCALED, CAPPED,
            SMOOTHED, ENTROPY, PREDICTED,
        )  # fmt: skip
        for first in range(BLOCK, last + (BLOCK if WHOLE else 0), BLOCK):
            z = fetch(source, first, first + BLOCK, BLOCK, "evict_last").to(tl.float32)
            s, t, u, best, at = _add(
                s, t, u, best, at, z, first + tl.arange(0, BLOCK) - off, first, vocabulary, m, exact, class_weight,
                logit_scale, softcap, BLOCK, LANES, False, RAGGED, EXACT, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY,
                PREDICTED,
            )  # fmt: skip
        if not WHOLE:
            if last > 0:
                z = fetch(source, last, whole, BLOCK, "evict_last").to(tl.float32)
                s, t, u, best, at = _add(
                    s, t, u, best, at, z, last + tl.arange(0, BLOCK) - off, last, vocabulary, m, exact, class_weight,
                    logit_scale, softcap, BLOCK, LANES, True, RAGGED or (CAPPED or SCALED), EXACT, QUICK, SCALED,
                    CAPPED, SMOOTHED, ENTROPY, PREDICTED,
                )  # fmt: skip
        if SKEWED:
            s = turn(s, off, LANES)
            t = turn(t, off, LANES) if ENTROPY else t
            u = turn(u, off, LANES) if SMOOTHED else u
        others, mixed = _without_target(
            s, t, lane, in_lane, z_lane, m, exact, logit_scale, softcap,
            LANES, EXACT, QUICK, SCALED, CAPPED, ENTROPY,
        )  # fmt: skip
        below = tl.sum(u, 0) if SMOOTHED else 0.0
        e2_y = exponent(x_y, m, exact)
        total = others + tl.math.exp2(e2_y)
        if ((total > SMALLEST) & (total < LARGEST) & (EXACT | (tl.abs(m) < FAR))) == 0:
            peak = tl.full([BLOCK], -float("inf"), tl.float32)
            for first in range(0, last + 1, BLOCK):
                z = fetch(source, first, whole, BLOCK, "evict_last").to(tl.float32)
                classes = first + tl.arange(0, BLOCK) - off
                x = activate(z, logit_scale, softcap, SCALED, CAPPED, QUICK)
                inside = (classes >= 0) & (classes < vocabulary) & (classes != y)
                peak = tl.maximum(peak, tl.where(inside, x, -float("inf")))
            m = finite(tl.maximum(tl.max(peak, 0), x_y))
            exact = is_exact(m, EXACT)
            s = nothing
            t = nothing
            u = nothing
            for first in range(0, last + 1, BLOCK):
                z = fetch(source, first, whole, BLOCK, "evict_last").to(tl.float32)
                s, t, u, _best, _at = _add(
                    s, t, u, best, at, z, first + tl.arange(0, BLOCK) - off, first, vocabulary, m, exact,
                    class_weight, logit_scale, softcap, BLOCK, LANES, True, RAGGED or (CAPPED or SCALED), True, QUICK,
                    SCALED, CAPPED, SMOOTHED, ENTROPY, False,
                )  # fmt: skip
            if SKEWED:
                s = turn(s, off, LANES)
                t = turn(t, off, LANES) if ENTROPY else t
                u = turn(u, off, LANES) if SMOOTHED else u
            others, mixed = _without_target(
                s, t, lane, in_lane, z_lane, m, exact, logit_scale, softcap,
                LANES, True, QUICK, SCALED, CAPPED, ENTROPY,
            )  # fmt: skip
            below = tl.sum(u, 0) if SMOOTHED else 0.0
            e2_y = exponent(x_y, m, exact)

        # Finish: the losses, what is reported, and the coefficients.
        e_y = tl.math.exp2(e2_y)
        total = others + e_y
        total_weight = 0.0
        if SMOOTHED:
            if target_logits is not None:
                raw = activate(tl.load(logits + begin + y).to(tl.float32), logit_scale, softcap, SCALED, CAPPED, QUICK)
                below += times(w_y, exponent(raw, m, exact)) - times(w_y, e2_y)
            below = LN2 * below
            total_weight = vocabulary * 1.0
            if class_weight is not None:
                total_weight = tl.load(class_weight_total)
        row_nll, log_sum, cost = losses(others, e_y, e2_y, below, total_weight, w_y, keep, spread, SMOOTHED)
        row_lse = m + log_sum
        squared = z_loss * row_lse * row_lse
        if Z_LOSS:
            cost += squared
        tl.store(loss + row, tl.where(dead, 0.0, a * cost))
        if REDUCED:
            ticket = _ticket(scratch + 3)
        if norm is not None:
            tl.store(norm + row, m)
            tl.store(norm + count + row, others)
            tl.store(norm + 2 * count + row, total)
        if lse is not None:
            tl.store(lse + row, row_lse)
        if nll is not None:
            tl.store(nll + row, tl.where(invalid, float("nan"), row_nll))
        if entropy is not None:
            mixed += times(e_y, tl.maximum(e2_y, FLOOR))
            tl.store(entropy + row, log_sum - LN2 * mixed / total)
        if z_term is not None:
            tl.store(z_term + row, tl.where(dead, 0.0, a * squared))
        if PREDICTED:
            top = tl.max(best, 0)
            first = tl.min(tl.where(best == top, at, NOWHERE), 0)
            z = fetch(source, first, whole, BLOCK, "evict_last").to(tl.float32)
            classes = first + tl.arange(0, BLOCK) - off
            inside = (classes >= 0) & (classes < vocabulary)
            found = tl.min(tl.where(inside & (order(z, inside, logit_scale) == top), classes, NOWHERE), 0)
            if predictions is not None:
                tl.store(predictions + row, found.to(tl.int64))
            if hits is not None:
                tl.store(hits + row, tl.where((found == y) & ~invalid, 1.0, 0.0))
        gamma, excess, delta = coefficients(r, w_y, total_weight, row_lse, keep, spread, z_loss, SMOOTHED, Z_LOSS)

        if grad is not None:
            if dead:
                clear(place, off, last, vocabulary, BLOCK, RAGGED, VECTOR)
            else:
                factor = (gamma + excess) / total
                m2 = m * LOG2E
                foldable = (factor > 0) & (factor < LARGEST) & (tl.abs(m2) < NEAR)
                if FOLDS and foldable:
                    _write(
                        source, place, off, last, vocabulary, whole, m2 - tl.log2(tl.where(foldable, factor, 1.0)),
                        exact, factor, delta, class_weight, logit_scale, softcap,
                        BLOCK, RAGGED, VECTOR, SKEWED, WHOLE, False, QUICK, SCALED, CAPPED, SMOOTHED, True,
                    )  # fmt: skip
                else:
                    _write(
                        source, place, off, last, vocabulary, whole, m, exact, factor, delta, class_weight, logit_scale,
                        softcap, BLOCK, RAGGED, VECTOR, SKEWED, WHOLE, True, QUICK, SCALED, CAPPED, SMOOTHED, False,
                    )  # fmt: skip
                g_y = target_gradient(
                    z_y, others, total, e_y, gamma, excess, delta, w_y, logit_scale, softcap, SCALED, CAPPED
                )
                tl.debug_barrier()
                tl.store(place + (off + y), g_y.to(grad.dtype.element_ty))

    if REDUCED:
        if ticket == (tl.num_programs(0) - 1).to(tl.float32):
            if MEAN:
                tl.store(total_loss, reduce_rows(loss, count, scratch, 1024))
            else:
                tl.store(total_loss, reduce_rows(loss, count, None, 1024))
