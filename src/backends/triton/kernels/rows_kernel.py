"""Loss, statistics and gradient of whole rows in one launch, with one program per row or part: fold, finish, gradient.

The first pass over a row computes its sums (`fold`). The second pass writes the gradient (`gradient`). It starts at the
end of the row, which is still in the caches. Only the first and the last block and the target's block need masks. The
target's own gradient is written after all others.

Rows that do not begin at multiples of 16 bytes (SKEWED) are read from the last multiple before them, so that loads and
stores keep their width.

Several programs share a long row (PARTS), so that fewer rows are in flight and the second pass finds them in the L2
cache. Each computes the sums and the gradient of its part of the classes (`exchange`), and all store the same results.
Rows with label smoothing are not shared; `xent.backends.triton.geometry.sizes` has the other conditions.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import (
    activation_of,
    coefficients,
    factors,
    finish,
    gradient_factor,
    numbers_of,
    position,
    record_nothing,
    row_facts,
    target_weight,
)
from xent.backends.triton.kernels.exchange import SUMS as _SUMS
from xent.backends.triton.kernels.exchange import WORDS as _WORDS
from xent.backends.triton.kernels.exchange import exchanged, numbered, rounding
from xent.backends.triton.kernels.fold import careful_sums, joined, lane_of_target, quick_sums
from xent.backends.triton.kernels.gradient import target_gradient, write_gradient
from xent.backends.triton.kernels.maths import FAR, LN2, LOG2E, NOWHERE, activate, exponent, order, times
from xent.backends.triton.kernels.memory import fetch, fill
from xent.backends.triton.prepared import kernel

__all__ = ["rows_kernel"]

# Between these bounds, sums and sums of squares have the full precision of float32.
SMALLEST = tl.constexpr(1e-12)
LARGEST = tl.constexpr(1e18)
# If the first block is all -inf, the reference is 0, which may be far from every logit. The entropy is then a
# difference of numbers as large as the sum's logarithm. So these bounds apply, with or without an entropy.
SMALLEST_FROM_0 = tl.constexpr(0.5)
LARGEST_FROM_0 = tl.constexpr(1048576.0)
# Up to this reference, the gradient's factor can be moved into the exponent for 16-bit logits.
NEAR = tl.constexpr(512.0)
SUMS = tl.constexpr(_SUMS)
WORDS = tl.constexpr(_WORDS)


@triton.jit
def _save(
    saved, count, row, m, exact, rest, mixed, z_y, w_y, total_weight,
    WEIGHT: tl.constexpr, BELOW: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Write the sums of a row that its gradient needs, as if exponents had subtracted m before they multiplied."""
    change = -rounding(m, exact)
    factor = tl.math.exp2(change)
    tl.store(saved + row, m)
    tl.store(saved + count + row, factor * rest)
    tl.store(saved + 2 * count + row, z_y)
    if WEIGHT > 0:
        tl.store(saved + WEIGHT * count + row, w_y)
    if BELOW > 0:
        tl.store(saved + (BELOW + 1) * count + row, total_weight - w_y)
    if MIXED > 0:
        tl.store(saved + MIXED * count + row, factor * (mixed + times(rest, change)) * LN2)


@kernel
def rows_kernel(
    logits,  # rows at position(row, inner, outer_stride, row_stride)
    logits_inner: "i64",
    logits_outer: "i64",
    logits_row: "i64",
    skew: "i64",  # offset of `logits` from a multiple of 16 bytes, in elements
    grad,  # gradient, or None; may be the logits; aligned like them
    grad_inner: "i64",
    grad_outer: "i64",
    grad_row: "i64",
    target_logits,  # (R,) float32 or None: replace the targets' raw logits
    saved,  # (K, N) float32 or None
    words,  # (rows of the launch, PARTS, WORDS) int64 and a counter, all 0; or None for one program per row
    rows,
    upstreams,
    results,
    start: "i64",  # index of the first row in the order
    count: "i64",  # N
    ignore_index: "i64",
    vocabulary: "i32",
    keep: "fp32",  # 1 - e
    spread: "fp32",  # e / V
    z_loss: "fp32",
    softcap: "fp32",
    logit_scale: "fp32",
    share: "i32",  # classes of a program: all, or a multiple of VECTOR; the last program has the rest
    GROUPED: tl.constexpr,  # rows are in several groups, see `position`
    ALL_ROWS: tl.constexpr,  # rows with weight 0 are computed for statistics or gradients of these
    SKEWED: tl.constexpr,  # rows may begin off 16-byte boundaries
    RAGGED: tl.constexpr,  # rows may begin or end off 16-byte boundaries
    VECTOR: tl.constexpr,  # elements of 16 bytes; 1 if logits and gradient are aligned differently
    WHOLE: tl.constexpr,  # the classes of each program are whole blocks
    EXACT: tl.constexpr,
    QUICK: tl.constexpr,
    FOLDS: tl.constexpr,  # the gradient's factor may go into the exponent
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    WEIGHT: tl.constexpr,  # these are columns of `saved`, -1 if not there
    BELOW: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,  # number of partial sums of a row
    BLOCKS: tl.constexpr,  # a power of two, at least the number of blocks of a program's classes, if they are aligned
    PARTS: tl.constexpr,  # a power of two: the number of programs that share a row
    PHASE: tl.constexpr,  # see `exchange`
):
    """See the module's docstring."""
    tl.static_assert(PARTS == 1 or not SMOOTHED)  # the sum `below` is not exchanged
    TILTED: tl.constexpr = upstreams.entropy is not None
    STATISTICS: tl.constexpr = TILTED or ((upstreams.lse is not None) or (upstreams.nll is not None))
    ENTROPY: tl.constexpr = TILTED or ((results.entropy is not None) or (MIXED > 0))
    SQUARED: tl.constexpr = results.log_sum_sq_probs is not None
    AVERAGED: tl.constexpr = results.mean_logit is not None
    PREDICTED: tl.constexpr = (results.predictions is not None) or (results.hits is not None)
    if PARTS > 1:
        program = numbered(words + tl.num_programs(0).to(tl.int64) * WORDS, PHASE)
    else:
        program = tl.program_id(0)
    here = (program // PARTS).to(tl.int64)
    row = start + here
    if rows.order is not None:
        row = tl.load(rows.order + row)
    y_long, a, ignored, invalid = row_facts(row, None, rows, ignore_index, vocabulary)
    w_y = target_weight(rows, y_long)
    y = y_long.to(tl.int32)
    keep, spread, z_loss = numbers_of(rows, vocabulary, keep, spread, z_loss)
    softcap, logit_scale = activation_of(row, None, rows, softcap, logit_scale)
    dead, r = gradient_factor(row, None, a, invalid, rows, upstreams)
    # The classes of this program, and the target among them.
    part = program % PARTS
    cut = part * share
    size = tl.minimum(vocabulary - cut, share)
    y_here = y - cut
    has_target = (y_here >= 0) & (y_here < size)
    begin = position(here, logits_inner, logits_outer, logits_row, GROUPED)
    off = 0
    if SKEWED:
        off = ((skew + begin) % VECTOR).to(tl.int32)
    source = tl.multiple_of(logits + (begin - off + cut), 16) if VECTOR > 1 else logits + (begin + cut)
    last = (size + off - 1) // BLOCK * BLOCK  # where the last block begins
    whole = (size + off + VECTOR - 1) // VECTOR * VECTOR  # where the last vector ends
    # The first loads need only the target. They start before the branch, which needs all facts of the row.
    first_block = fetch(source, 0, tl.where(ignored, 0, whole), BLOCK, VECTOR, "evict_last")
    second_block = fetch(source, BLOCK, tl.where(ignored, 0, whole), BLOCK, VECTOR, "evict_last")
    lane, classes, in_lane, z_lane = lane_of_target(
        source, off, y_here, tl.where(ignored, 0, size), BLOCK, LANES, BLOCKS
    )
    if target_logits is None:
        z_y = tl.load(logits + begin + y, mask=has_target & ~ignored, other=0.0).to(tl.float32)
    else:
        z_y = tl.load(target_logits + here)
    if grad is not None:
        place = grad + (position(here, grad_inner, grad_outer, grad_row, GROUPED) - off + cut)
        if VECTOR > 1:
            place = tl.multiple_of(place, 16)

    if (ignored if ALL_ROWS else dead) != 0:
        record_nothing(row, None, results)
        if grad is not None:
            fill(place, 0.0, off, 0, last, size, BLOCK, RAGGED, VECTOR)
    else:
        x_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED, False)
        m, exact, s, t, u, q, v, best, at = quick_sums(
            source, first_block, second_block, off, last, whole, size, None, rows.class_weight, logit_scale, softcap,
            BLOCK, LANES, BLOCKS, WHOLE, SKEWED, RAGGED, VECTOR, EXACT, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY,
            SQUARED, AVERAGED, PREDICTED,
        )  # fmt: skip
        rest, mixed, below, squares, level = joined(
            s, t, u, q, v, off, lane, classes, in_lane, z_lane, m, exact, rows.class_weight, logit_scale, softcap,
            LANES, SKEWED, EXACT, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY, SQUARED, AVERAGED,
        )  # fmt: skip
        e2_y = exponent(x_y, m, exact)
        total = rest + tl.where(has_target, tl.math.exp2(e2_y), 0.0)
        least = tl.where(m == 0, SMALLEST_FROM_0, SMALLEST)
        most = tl.where(m == 0, LARGEST_FROM_0, LARGEST)
        if ((total > least) & (total < most) & (EXACT | (tl.abs(m) < FAR))) == 0:
            m, exact, s, t, u, q, v = careful_sums(
                source, off, last, whole, size, y_here, tl.where(has_target, x_y, -float("inf")), rows.class_weight,
                logit_scale, softcap, BLOCK, LANES, RAGGED, VECTOR, EXACT, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY,
                SQUARED, AVERAGED,
            )  # fmt: skip
            rest, mixed, below, squares, level = joined(
                s, t, u, q, v, off, lane, classes, in_lane, z_lane, m, exact, rows.class_weight, logit_scale, softcap,
                LANES, SKEWED, True, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY, SQUARED, AVERAGED,
            )  # fmt: skip
            e2_y = exponent(x_y, m, exact)
        top = 0.0
        found = tl.zeros_like(y)
        if PREDICTED:
            top = tl.max(best, 0)
            first = tl.min(tl.where(best == top, at, NOWHERE), 0)
            z = fetch(source, first, whole, BLOCK, VECTOR, "evict_last")
            ids = first + tl.arange(0, BLOCK) - off
            inside = (ids >= 0) & (ids < size)
            found = cut + tl.min(tl.where(inside & (order(z, inside, logit_scale, SCALED) == top), ids, NOWHERE), 0)
        if PARTS > 1:
            z_y, m, exact, rest, mixed, squares, level, found = exchanged(
                words + here * PARTS * WORDS, part, has_target, z_y, x_y, m, rest, mixed, squares, level, top, found,
                PARTS, PHASE, EXACT,
            )  # fmt: skip
            x_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED, False)
            e2_y = exponent(x_y, m, exact)

        if PHASE != SUMS:
            total_weight = vocabulary * 1.0
            if SMOOTHED:
                below -= times(w_y, e2_y)
                if rows.class_weight is not None:
                    total_weight = tl.load(rows.total_weight)
            nll, log_sum, entropy = finish(
                row, None, y, a, w_y, dead, ignored, invalid, m, rest, e2_y, below * LN2, total_weight, mixed, squares,
                (level + x_y) / vocabulary, found, results, keep, spread, z_loss, SMOOTHED, Z_LOSS, ENTROPY,
            )  # fmt: skip
            if saved is not None:
                _save(saved, count, row, m, exact, rest, mixed, z_y, w_y, total_weight, WEIGHT, BELOW, MIXED)
            if grad is not None:
                if ignored if STATISTICS else dead:
                    fill(place, 0.0, off, 0, last, size, BLOCK, RAGGED, VECTOR)
                else:
                    gamma, excess, beta, delta = coefficients(
                        row, None, r, w_y, total_weight, m + log_sum, entropy, upstreams, keep, spread, z_loss,
                        SMOOTHED, Z_LOSS,
                    )  # fmt: skip
                    e_y = tl.math.exp2(e2_y)
                    total = rest + e_y
                    factor, tilt = factors(gamma, excess, beta, log_sum, total, TILTED)
                    m2 = m * LOG2E
                    foldable = (factor > 0) & (factor < LARGEST) & (tl.abs(m2) < NEAR)
                    if FOLDS and foldable:
                        write_gradient(
                            source, place, off, 0, last, size, whole, m2 - tl.log2(tl.where(foldable, factor, 1.0)),
                            exact, factor, tilt, delta, rows.class_weight, logit_scale, softcap, BLOCK, RAGGED, VECTOR,
                            SKEWED, WHOLE, False, QUICK, SCALED, CAPPED, SMOOTHED, False, True,
                        )  # fmt: skip
                    else:
                        write_gradient(
                            source, place, off, 0, last, size, whole, m, exact, factor, tilt, delta, rows.class_weight,
                            logit_scale, softcap, BLOCK, RAGGED, VECTOR, SKEWED, WHOLE, True, QUICK, SCALED, CAPPED,
                            SMOOTHED, TILTED, False,
                        )  # fmt: skip
                    g_y = target_gradient(
                        z_y, rest, total, e_y, gamma, excess, beta, nll, delta, w_y, logit_scale, softcap,
                        SCALED, CAPPED, TILTED,
                    )  # fmt: skip
                    tl.debug_barrier()
                    tl.store(place + (off + y_here), g_y.to(grad.dtype.element_ty), mask=has_target)
