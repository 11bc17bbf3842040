"""Loss, statistics and gradient of whole rows in one launch, with one program per row or part: fold, finish, gradient.

The first pass over a row computes its sums (`row_fold`). The second pass writes the gradient (`row_gradient`). It
starts at the end of the row, which is still in the caches. Only the first and the last block and the target's block
need masks. The target's own gradient is written after all others.

Rows that do not begin at multiples of 16 bytes (SKEWED) are read from the last multiple before them, so that loads and
stores keep their width.

Several programs share a long row (PARTS), so that fewer rows are in flight and the second pass finds them in the L2
cache. Each computes the sums and the gradient of its part of the classes (`row_exchange`), and all store the same
results. Rows with label smoothing are not shared; `launch_rows` and `sizes` have the other conditions.
"""

import triton.language as tl

from xent.backends.triton.launch import kernel
from xent.backends.triton.maths import FAR, LN2, LOG2E, NOWHERE, activate, exponent, order, times
from xent.backends.triton.row_algebra import (
    bend_of_row,
    coefficients,
    entropy_of,
    factors,
    gradient_factor,
    inverse_of_few,
    log_of_squares,
    losses,
    position,
    row_facts,
    with_statistics,
)
from xent.backends.triton.row_exchange import SUMS as _SUMS
from xent.backends.triton.row_exchange import WORDS as _WORDS
from xent.backends.triton.row_exchange import exchanged
from xent.backends.triton.row_fold import careful_sums, joined, lane_of_target, quick_sums
from xent.backends.triton.row_gradient import target_gradient, write_gradient
from xent.backends.triton.row_memory import fetch, fill
from xent.backends.triton.row_results import record, store_nothing

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
    order_of_rows,  # (N,) int64, the rows in computation order; or None
    start: "i64",  # index of the first row in that order
    target,  # (N,) integers, or None for probabilities
    sample_weight,  # (N,) or None
    class_weight,  # (V,) float32 or None
    class_weight_total,  # () float32 or None
    target_logits,  # (R,) float32 or None: replace the targets' raw logits
    upstream,  # (N,), or (1,) with a stride of 0, or None
    upstream_stride: "i64",
    lse_upstream,  # (N,) or None, like the next two; if one is given, gradients are for these and `upstream`
    lse_upstream_stride: "i64",
    nll_upstream,
    nll_upstream_stride: "i64",
    entropy_upstream,
    entropy_upstream_stride: "i64",
    scratch,  # float32: D, 1 / D (0 for D = 0), remaining factor of narrow gradients; or None
    loss,  # (N,) float32, like all results
    norm,  # (3, N): m, others, total; or None
    lse,
    nll,
    entropy,
    predictions,  # int64
    hits,  # 1 where the prediction is the target
    z_term,
    log_sum_sq,
    mean_logit,
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
    bend,  # (N, 2): logit scale and softcap of each position of the target; or None
    bend_stride: "i64",
    words,  # (rows of the launch, PARTS, WORDS) int64, all 0 before the first phase; or None for one program per row
    share: "i32",  # classes of a program: all, or a multiple of VECTOR; the last program has the rest
    SHIFTED: tl.constexpr,
    GROUPED: tl.constexpr,  # rows are in several groups, see `position`
    MEAN: tl.constexpr,
    FEW: tl.constexpr,  # if > 0, this kernel computes the divisor of up to so many rows, and writes it to `scratch`
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
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,  # number of partial sums of a row
    BLOCKS: tl.constexpr,  # a power of two, at least the number of blocks of a program's classes, if they are aligned
    PARTS: tl.constexpr,  # a power of two: the number of programs that share a row
    PHASE: tl.constexpr,  # see `row_exchange`
):
    """See the module's docstring."""
    tl.static_assert(PARTS == 1 or not SMOOTHED)  # the sum `below` is not exchanged
    TILTED: tl.constexpr = entropy_upstream is not None
    STATISTICS: tl.constexpr = TILTED or ((lse_upstream is not None) or (nll_upstream is not None))
    ENTROPY: tl.constexpr = TILTED or (entropy is not None)
    SQUARED: tl.constexpr = log_sum_sq is not None
    AVERAGED: tl.constexpr = mean_logit is not None
    PREDICTED: tl.constexpr = (predictions is not None) or (hits is not None)
    program = tl.program_id(0)
    here = (program // PARTS).to(tl.int64)
    row = start + here
    if order_of_rows is not None:
        row = tl.load(order_of_rows + row)
    y, a, w_y, ignored, invalid = row_facts(
        row, row < count, target, sample_weight, class_weight, length, shift, ignore_index, vocabulary, SHIFTED, False
    )
    y = y.to(tl.int32)
    softcap, logit_scale = bend_of_row(row, bend, bend_stride, softcap, logit_scale, count, shift, SHIFTED)
    inverse = 1.0
    if FEW > 0:
        inverse = inverse_of_few(
            scratch, program == 0, count, target, length, shift, ignore_index, vocabulary, SHIFTED, FEW
        )
    elif MEAN:
        inverse = tl.load(scratch + 1)
    dead, r = gradient_factor(a, inverse, invalid, row, upstream, upstream_stride, STATISTICS)
    a = tl.where(invalid, float("nan"), a)
    # The classes of this program, and the target among them.
    part = program % PARTS
    cut = part * share
    size = tl.minimum(vocabulary - cut, share)
    y_here = y - cut
    has_target = True
    if PARTS > 1:
        has_target = (y_here >= 0) & (y_here < size)
    begin = position(here, logits_inner, logits_outer, logits_row, GROUPED)
    off = 0
    if SKEWED:
        off = ((skew + begin) % VECTOR).to(tl.int32)
    source = tl.multiple_of(logits + (begin - off + cut), 16) if VECTOR > 1 else logits + (begin + cut)
    last = (size + off - 1) // BLOCK * BLOCK  # where the last block begins
    whole = (size + off + VECTOR - 1) // VECTOR * VECTOR  # where the last vector ends
    # The first loads need only the target. They start before the branch, which needs all facts of the row.
    wanted = ~ignored
    first_block = fetch(source, 0, tl.where(wanted, whole, 0), BLOCK, VECTOR, "evict_last")
    second_block = fetch(source, BLOCK, tl.where(wanted, whole, 0), BLOCK, VECTOR, "evict_last")
    lane, _classes, in_lane, z_lane = lane_of_target(wanted, source, off, y_here, size, BLOCK, LANES, BLOCKS)
    stored = 0.0
    if target_logits is None:
        z_y = tl.load(logits + begin + y, mask=wanted & has_target, other=0.0).to(tl.float32)
    else:
        z_y = tl.load(target_logits + here)
        if SMOOTHED:  # before the first barrier: the gradient may overwrite the logits
            stored = tl.load(logits + begin + y, mask=wanted, other=0.0).to(tl.float32)
    if grad is not None:
        place = grad + (position(here, grad_inner, grad_outer, grad_row, GROUPED) - off + cut)
        if VECTOR > 1:
            place = tl.multiple_of(place, 16)

    if (ignored if ALL_ROWS else dead) != 0:
        tl.store(loss + row, 0.0)
        if norm is not None:
            tl.store(norm + row, 0.0)
            tl.store(norm + count + row, 0.0)
            tl.store(norm + 2 * count + row, 1.0)
        store_nothing(row, lse, nll, entropy, predictions, hits, z_term, log_sum_sq, mean_logit)
        if grad is not None:
            fill(place, 0.0, off, 0, last, size, BLOCK, RAGGED, VECTOR)
    else:
        x_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED, False)
        m, exact, s, t, u, q, v, best, at = quick_sums(
            source, first_block, second_block, off, last, whole, size, None, class_weight, logit_scale, softcap,
            BLOCK, LANES, BLOCKS, WHOLE, SKEWED, RAGGED, VECTOR, EXACT, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY,
            SQUARED, AVERAGED, PREDICTED,
        )  # fmt: skip
        others, mixed, below, squares, level = joined(
            s, t, u, q, v, off, lane, in_lane, z_lane, m, exact, logit_scale, softcap,
            LANES, SKEWED, EXACT, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY, SQUARED, AVERAGED,
        )  # fmt: skip
        e2_y = exponent(x_y, m, exact)
        total = others + tl.where(has_target, tl.math.exp2(e2_y), 0.0)
        least = tl.where(m == 0, SMALLEST_FROM_0, SMALLEST)
        most = tl.where(m == 0, LARGEST_FROM_0, LARGEST)
        if ((total > least) & (total < most) & (EXACT | (tl.abs(m) < FAR))) == 0:
            m, exact, s, t, u, q, v = careful_sums(
                source, off, last, whole, size, y_here, tl.where(has_target, x_y, -float("inf")), class_weight,
                logit_scale, softcap, BLOCK, LANES, RAGGED, VECTOR, EXACT, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY,
                SQUARED, AVERAGED,
            )  # fmt: skip
            others, mixed, below, squares, level = joined(
                s, t, u, q, v, off, lane, in_lane, z_lane, m, exact, logit_scale, softcap,
                LANES, SKEWED, True, QUICK, SCALED, CAPPED, SMOOTHED, ENTROPY, SQUARED, AVERAGED,
            )  # fmt: skip
            e2_y = exponent(x_y, m, exact)
        top = 0.0
        found = tl.zeros_like(y)
        if PREDICTED:
            top = tl.max(best, 0)
            first = tl.min(tl.where(best == top, at, NOWHERE), 0)
            z = fetch(source, first, whole, BLOCK, VECTOR, "evict_last")
            classes = first + tl.arange(0, BLOCK) - off
            inside = (classes >= 0) & (classes < size)
            found = tl.min(tl.where(inside & (order(z, inside, logit_scale, SCALED) == top), classes, NOWHERE), 0)
            found += cut
        if PARTS > 1:
            z_y, m, exact, others, mixed, squares, level, found = exchanged(
                words + here * PARTS * WORDS, part, has_target, z_y, x_y, m, others, mixed, squares, level, top, found,
                PARTS, PHASE, EXACT,
            )  # fmt: skip
            x_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED, False)
            e2_y = exponent(x_y, m, exact)

        if PHASE != SUMS:
            # Finish: the losses, the statistics and the coefficients.
            e_y = tl.math.exp2(e2_y)
            total = others + e_y
            total_weight = 0.0
            if SMOOTHED:
                if target_logits is not None:
                    x_stored = activate(stored, logit_scale, softcap, SCALED, CAPPED, QUICK)
                    below += times(w_y, exponent(x_stored, m, exact)) - times(w_y, e2_y)
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
            if norm is not None:
                tl.store(norm + row, m)
                tl.store(norm + count + row, others)
                tl.store(norm + 2 * count + row, total)
            record(lse, row, row_lse)
            record(nll, row, tl.where(invalid, float("nan"), row_nll))
            row_entropy = 0.0
            if ENTROPY:
                row_entropy = entropy_of(mixed, others, e_y, e2_y, row_nll, log_sum)
            record(entropy, row, row_entropy)
            record(z_term, row, tl.where(dead, 0.0, a * squared))
            if log_sum_sq is not None:
                tl.store(log_sum_sq + row, log_of_squares(squares, others, e_y, row_nll, log_sum))
            record(mean_logit, row, level / vocabulary)
            record(predictions, row, found.to(tl.int64))
            record(hits, row, tl.where((found == y) & ~invalid, 1.0, 0.0))
            gamma, excess, delta = coefficients(r, w_y, total_weight, row_lse, keep, spread, z_loss, SMOOTHED, Z_LOSS)
            gamma, excess, beta = with_statistics(
                gamma, excess, row, row_entropy, lse_upstream, lse_upstream_stride, nll_upstream, nll_upstream_stride,
                entropy_upstream, entropy_upstream_stride,
            )  # fmt: skip

            if grad is not None:
                if ignored if STATISTICS else dead:
                    fill(place, 0.0, off, 0, last, size, BLOCK, RAGGED, VECTOR)
                else:
                    factor, tilt = factors(gamma, excess, beta, log_sum, total, TILTED)
                    m2 = m * LOG2E
                    foldable = (factor > 0) & (factor < LARGEST) & (tl.abs(m2) < NEAR)
                    if FOLDS and foldable:
                        write_gradient(
                            source, place, off, 0, last, size, whole, m2 - tl.log2(tl.where(foldable, factor, 1.0)),
                            exact, factor, tilt, delta, class_weight, logit_scale, softcap, BLOCK, RAGGED, VECTOR,
                            SKEWED, WHOLE, False, QUICK, SCALED, CAPPED, SMOOTHED, False, True,
                        )  # fmt: skip
                    else:
                        write_gradient(
                            source, place, off, 0, last, size, whole, m, exact, factor, tilt, delta, class_weight,
                            logit_scale, softcap, BLOCK, RAGGED, VECTOR, SKEWED, WHOLE, True, QUICK, SCALED, CAPPED,
                            SMOOTHED, TILTED, False,
                        )  # fmt: skip
                    g_y = target_gradient(
                        z_y, others, total, e_y, gamma, excess, beta, row_nll, delta, w_y, logit_scale, softcap,
                        SCALED, CAPPED, TILTED,
                    )  # fmt: skip
                    tl.debug_barrier()
                    tl.store(place + (off + y_here), g_y.to(grad.dtype.element_ty), mask=has_target)
