"""Loss, statistics and gradient of whole rows in one launch, with one program per row or part: fold, finish, gradient.

The first pass over a row computes its sums (`fold`). The second pass writes the gradient (`gradient`). It starts at the
end of the row, which is still in the caches. Only the first and the last block and the target's block need masks. The
target's own gradient is written after all others.

Rows that do not begin at multiples of 16 bytes (skewed) are read from the last multiple before them, so that loads and
stores keep their width.

Several programs share a long row (parts), so that fewer rows are in flight and the second pass finds them in the L2
cache. Each computes the sums and the gradient of its part of the classes (`exchange`), and all store the same results.
Rows with label smoothing are not shared; `xent.backends.triton.geometry.sizes` has the other conditions.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import (
    activation_of,
    coefficients,
    finish,
    gradient_factor,
    numbers_of,
    record_nothing,
    row_at,
    row_facts,
    target_weight,
)
from xent.backends.triton.kernels.exchange import SUMS as _SUMS
from xent.backends.triton.kernels.exchange import WORDS as _WORDS
from xent.backends.triton.kernels.exchange import exchanged, numbered
from xent.backends.triton.kernels.fold import lane_of_target, row_sums
from xent.backends.triton.kernels.gradient import row_factors, write_gradient
from xent.backends.triton.kernels.maths import LN2, LOG2E, activate, exponent, rounding, times
from xent.backends.triton.kernels.memory import aligned, fetch, fill, offset
from xent.backends.triton.kernels.sums import put
from xent.backends.triton.prepared import kernel

__all__ = ["rows_kernel"]

# Up to this reference, the gradient's factor can be moved into the exponent for 16-bit logits.
NEAR = tl.constexpr(512.0)
LARGEST_FACTOR = tl.constexpr(1e18)
SUMS = tl.constexpr(_SUMS)
WORDS = tl.constexpr(_WORDS)


@triton.jit
def _save(
    saved, count, row, m, rest, mixed, z_y, w_y, total_weight, columns: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Write the sums of a row that its gradient needs, as if exponents had subtracted m before they multiplied."""
    change = -rounding(m, EXACT)
    factor = tl.math.exp2(change)
    place = saved + row
    put(place, count, None, m, 0)
    put(place, count, None, factor * rest, 1)
    put(place, count, None, z_y, 2)
    put(place, count, None, w_y, columns.row_weight)
    put(place, count, None, total_weight - w_y, columns.weights)
    put(place, count, None, factor * (mixed + times(rest, change)) * LN2, columns.mixed)


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
    words,  # (rows of the launch, `Way.parts`, WORDS) int64 and a counter, all 0; or None for one program per row
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
    columns: tl.constexpr,  # of `saved`, see `Columns`
    way: tl.constexpr,  # see `Way`
):
    """See the module's docstring."""
    tl.static_assert(way.parts == 1 or not way.smoothed)  # the sum `below` is not exchanged
    if way.parts > 1:
        program = numbered(words + tl.num_programs(0).to(tl.int64) * WORDS, way.phase)
    else:
        program = tl.program_id(0)
    here = (program // way.parts).to(tl.int64)
    row = row_at(start + here, None, rows)
    y_long, a, ignored, invalid = row_facts(row, None, rows, ignore_index, vocabulary)
    w_y = target_weight(rows, y_long)
    y = y_long.to(tl.int32)
    numbers = numbers_of(rows, vocabulary, keep, spread, z_loss)
    softcap, logit_scale = activation_of(row, None, rows, softcap, logit_scale)
    bend = logit_scale if way.scaled else None, softcap if way.capped else None
    dead, r = gradient_factor(row, None, a, invalid, rows, upstreams)
    # The classes of this program, and the target among them.
    part = program % way.parts
    cut = part * share
    size = tl.minimum(vocabulary - cut, share)
    y_here = y - cut
    has_target = (y_here >= 0) & (y_here < size)
    off = offset(here, logits_inner, logits_outer, logits_row, skew, way)
    source = aligned(logits, here, logits_inner, logits_outer, logits_row, cut - off, way)
    last = (size + off - 1) // way.block * way.block  # where the last block begins
    whole = (size + off + way.vector - 1) // way.vector * way.vector  # where the last vector ends
    # The first loads need only the target. They start before the branch, which needs all facts of the row.
    z = fetch(source, 0, tl.where(ignored, 0, whole), way, "evict_last")
    ahead = fetch(source, way.block, tl.where(ignored, 0, whole), way, "evict_last")
    target_lane = lane_of_target(source, off, y_here, tl.where(ignored, 0, size), way)
    if target_logits is None:
        z_y = tl.load(source + (off + y_here), mask=has_target & ~ignored, other=0.0).to(tl.float32)
    else:
        z_y = tl.load(target_logits + here)
    if grad is not None:
        place = aligned(grad, here, grad_inner, grad_outer, grad_row, cut - off, way)

    if (ignored if way.all_rows else dead) != 0:
        record_nothing(row, results)
        if grad is not None:
            fill(place, 0.0, off, 0, last, size, way)
    else:
        x_y = activate(z_y, bend, False)
        line = source, off, last, whole, size
        m, rest, mixed, below, squares, level, top, found = row_sums(
            line, z, ahead, y_here, x_y, has_target, target_lane, rows.class_weight, bend, way
        )
        found += cut
        if way.parts > 1:
            z_y, m, rest, mixed, squares, level, found = exchanged(
                words + here * way.parts * WORDS, part, has_target, z_y, x_y, m, rest, mixed, squares, level, top,
                found, way,
            )  # fmt: skip
            x_y = activate(z_y, bend, False)
        e2_y = exponent(x_y, m, way.exact)

        if way.phase != SUMS:
            total_weight = vocabulary * 1.0
            if way.smoothed:
                below -= times(w_y, e2_y)
                if rows.class_weight is not None:
                    total_weight = tl.load(rows.total_weight)
            nll, log_sum, entropy = finish(
                row, None, (y, a, ignored, invalid), dead, w_y, m, rest, e2_y, below * LN2, total_weight, mixed,
                squares, (level + x_y) / vocabulary, found, results, numbers, way.smoothed, way.z_loss, way.entropy,
            )  # fmt: skip
            if saved is not None:
                _save(saved, count, row, m, rest, mixed, z_y, w_y, total_weight, columns, way.exact)
            if grad is not None:
                if ignored if way.statistics else dead:
                    fill(place, 0.0, off, 0, last, size, way)
                else:
                    gamma, excess, beta, delta = coefficients(
                        row, None, r, w_y, total_weight, m + log_sum, entropy, upstreams, numbers, way.smoothed,
                        way.z_loss,
                    )  # fmt: skip
                    factor, tilt, g_y = row_factors(
                        gamma, excess, beta, delta, z_y, w_y, rest, e2_y, nll, log_sum, bend, way.tilted
                    )
                    m2 = m * LOG2E
                    foldable = (factor > 0) & (factor < LARGEST_FACTOR) & (tl.abs(m2) < NEAR)
                    if way.folds and foldable:
                        terms = m2 - tl.log2(tl.where(foldable, factor, 1.0)), factor, tilt, delta
                        write_gradient(line, place, 0, terms, rows.class_weight, bend, way, True)
                    else:
                        terms = m, factor, tilt, delta
                        write_gradient(line, place, 0, terms, rows.class_weight, bend, way, False)
                    tl.debug_barrier()
                    tl.store(place + (off + y_here), g_y.to(grad.dtype.element_ty), mask=has_target)
