"""Fold and finish over tiles of logits that are small enough to stay in the L2 cache.

A tile has some thousand rows and classes. A matrix product computes it, `tile_kernel` folds it into each row's sums,
and the next tile reuses its memory. `finish_kernel` adds the target's float32 logit and stores the results.
`join_kernel` merges sums over parts of the classes. The sums are those of `row_algebra`, relative to the largest x so
far.
"""

import triton.language as tl

from xent.backends.triton.launch import kernel
from xent.backends.triton.maths import LN2, LOG2E, NOWHERE, activate, exp, finite, order, times
from xent.backends.triton.row_algebra import bend_of_row, log_of_squares, row_facts
from xent.backends.triton.row_results import record

__all__ = ["finish_kernel", "join_kernel", "tile_kernel"]


@kernel
def tile_kernel(
    tile,  # (R, width): classes first, first + 1, ... of rows start, start + 1, ...
    tile_stride: "i64",
    width: "i32",
    start: "i64",
    first: "i32",
    classes,  # (N,) int32, the target of each row
    peaks,  # (N,) float32, like all sums
    totals,
    mixed,  # None if the entropy is not requested
    below,  # None without smoothing
    seen,
    best,  # None if predictions are not requested
    at,  # (N,) int32
    squares,  # sums of e^(2 (x - largest)); or None
    level,  # sums of x; or None
    class_weight,
    softcap: "fp32",
    logit_scale: "fp32",
    bend,  # as in `rows_kernel`
    bend_stride: "i64",
    count: "i64",
    shift: "i64",
    SHIFTED: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a tile to the sums of one row."""
    tile += tl.program_id(0).to(tl.int64) * tile_stride
    row = start + tl.program_id(0).to(tl.int64)
    y = tl.load(classes + row) - first
    softcap, logit_scale = bend_of_row(row, bend, bend_stride, softcap, logit_scale, count, shift, SHIFTED)
    peak = -float("inf")
    total = 0.0
    mix = 0.0
    under = 0.0
    weights = 0.0
    top = -float("inf")
    found = 0
    square = 0.0
    height = 0.0
    if first > 0:
        peak = tl.load(peaks + row)
        total = tl.load(totals + row)
        if mixed is not None:
            mix = tl.load(mixed + row)
        if below is not None:
            under = tl.load(below + row)
            weights = tl.load(seen + row)
        if best is not None:
            top = tl.load(best + row)
            found = tl.load(at + row)
        if squares is not None:
            square = tl.load(squares + row)
        if level is not None:
            height = tl.load(level + row)
    for left in range(0, width, BLOCK):
        columns = left + tl.arange(0, BLOCK)
        inside = columns < width
        z = tl.load(tile + columns, mask=inside, other=0.0).to(tl.float32)
        if best is not None:
            key = order(z, inside, logit_scale, SCALED)
            largest = tl.max(key, 0)
            lowest = tl.min(tl.where(key == largest, columns, NOWHERE), 0) + first
            found = tl.where(largest > top, lowest, found)
            top = tl.maximum(top, largest)
        x = activate(z, logit_scale, softcap, SCALED, CAPPED, False)
        others = inside & (columns != y)
        if level is not None:
            height += tl.sum(tl.where(others, x, 0.0), 0)
        x = tl.where(others, x, -float("inf"))
        larger = tl.maximum(peak, tl.max(x, 0))
        reference = finite(larger)
        growth = tl.where(peak == -float("inf"), 0.0, larger - peak)
        e = exp(x - reference)
        if mixed is not None:
            mix = exp(-growth) * (mix - growth * total) + tl.sum(times(e, x - reference), 0)
        if below is not None:
            w = tl.where(others, 1.0, 0.0)
            if class_weight is not None:
                w = tl.load(class_weight + first + columns, mask=others, other=0.0)
            # If all classes so far are -inf, there is no reference. Those with a weight are infinitely far below any
            # other.
            under += times(weights, tl.where((peak == -float("inf")) & (larger != peak), float("inf"), growth))
            under += tl.sum(times(w, reference - x), 0)
            weights += tl.sum(w, 0)
        if squares is not None:
            square = exp(-2 * growth) * square + tl.sum(e * e, 0)
        total = exp(-growth) * total + tl.sum(e, 0)
        peak = larger
    tl.store(peaks + row, peak)
    tl.store(totals + row, total)
    if mixed is not None:
        tl.store(mixed + row, mix)
    if below is not None:
        tl.store(below + row, under)
        tl.store(seen + row, weights)
    if best is not None:
        tl.store(best + row, top)
        tl.store(at + row, found)
    if squares is not None:
        tl.store(squares + row, square)
    if level is not None:
        tl.store(level + row, height)


@kernel
def join_kernel(
    part_peaks,  # (parts, R)
    part_totals,
    part_mixed,  # in units of log2; or None
    peaks,  # (R,)
    totals,
    mixed,
    rows: "i64",
    parts: "i32",
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # parts that are read at a time
):
    """Merge the sums of a block of rows over parts of the classes."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mix = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        place = part[:, None] * rows + row[None, :]
        inside = (part < parts)[:, None] & (row < rows)[None, :]
        part_peak = tl.load(part_peaks + place, mask=inside, other=-float("inf"))
        part_total = tl.load(part_totals + place, mask=inside, other=0.0)
        larger = tl.maximum(peak, tl.max(part_peak, 0))
        reference = finite(larger)
        kept = exp(peak - reference)
        share = exp(part_peak - reference[None, :])
        if mixed is not None:
            part_mix = tl.load(part_mixed + place, mask=inside, other=0.0)
            growth = tl.where(part_peak == -float("inf"), 0.0, (reference[None, :] - part_peak) * LOG2E)
            mix = kept * (mix - tl.where(peak == -float("inf"), 0.0, (reference - peak) * LOG2E) * total)
            mix += tl.sum(share * (part_mix - growth * part_total), 0)
        total = kept * total + tl.sum(share * part_total, 0)
        peak = larger
    tl.store(peaks + row, peak, mask=row < rows)
    tl.store(totals + row, total, mask=row < rows)
    if mixed is not None:
        tl.store(mixed + row, mix * LN2, mask=row < rows)


@kernel
def finish_kernel(
    peaks,  # these are sums from `tile_kernel`
    totals,
    mixed,
    below,
    seen,
    best,  # not used
    at,
    squares,
    level,
    target_logits,  # (N,) float32
    target,
    sample_weight,
    class_weight,
    scratch,
    loss,  # (N,) like all results
    lse,
    nll,
    entropy,
    predictions,
    hits,
    z_term,
    log_sum_sq,
    mean_logit,
    norm,  # (3, N), as in `rows_kernel`; or None
    count: "i64",
    length: "i64",
    shift: "i64",
    ignore_index: "i64",
    vocabulary: "i32",
    keep: "fp32",
    spread: "fp32",
    z_loss: "fp32",
    softcap: "fp32",
    logit_scale: "fp32",
    bend,
    bend_stride: "i64",
    SHIFTED: tl.constexpr,
    MEAN: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the results of a block of rows from their sums."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    y, a, w_y, ignored, invalid = row_facts(
        row, inside, target, sample_weight, class_weight, length, shift, ignore_index, vocabulary, SHIFTED, False
    )
    softcap, logit_scale = bend_of_row(row, bend, bend_stride, softcap, logit_scale, count, shift, SHIFTED)
    dead = (tl.where(tl.load(scratch + 1) == 0, 0.0, a) == 0 if MEAN else a == 0) & ~invalid
    a = tl.where(invalid, float("nan"), a)
    z_y = tl.load(target_logits + row, mask=inside, other=0.0)
    x_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED, False)
    others_peak = tl.load(peaks + row, mask=inside, other=0.0)
    others_total = tl.load(totals + row, mask=inside, other=1.0)
    # Add the target. m is the largest x of all classes.
    m = tl.maximum(others_peak, x_y)
    reference = finite(m)
    growth = tl.where(others_peak == -float("inf"), 0.0, reference - others_peak)
    others = others_total * exp(-growth)
    e_y = exp(x_y - reference)
    total = others + e_y
    # log(total); if the target is the largest, log1p of the sum of the others.
    small = tl.where(x_y == m, others, 0.5)
    w = 1 + small
    log_sum = tl.where(
        x_y == m, tl.where(w == 1, small, tl.log(w) * (small / tl.where(w == 1, 1.0, w - 1))), tl.log(total)
    )
    log_p_y = (x_y - reference) - log_sum
    row_lse = reference + log_sum
    cost = -times(keep * w_y, log_p_y)
    if below is not None:
        weights = tl.load(seen + row, mask=inside, other=0.0)
        under = tl.load(below + row, mask=inside, other=0.0)
        under += times(weights, tl.where(others_peak == -float("inf"), float("inf"), growth))
        under += times(w_y, reference - x_y)
        cost += spread * ((weights + w_y) * log_sum + under)
    squared = z_loss * row_lse * row_lse
    if Z_LOSS:
        cost += squared
    tl.store(loss + row, tl.where(dead, 0.0, a * cost), mask=inside)
    if norm is not None:
        tl.store(norm + row, reference, mask=inside)
        tl.store(norm + count + row, others, mask=inside)
        tl.store(norm + 2 * count + row, total, mask=inside)
    record(lse, row, tl.where(ignored, 0.0, row_lse), inside)
    record(nll, row, tl.where(ignored, 0.0, tl.where(invalid, float("nan"), -log_p_y)), inside)
    if entropy is not None:
        mix = tl.load(mixed + row, mask=inside, other=0.0)
        mix = exp(-growth) * (mix - growth * others_total) + times(e_y, x_y - reference)
        tl.store(entropy + row, tl.where(ignored, 0.0, log_sum - mix / total), mask=inside)
    record(z_term, row, tl.where(dead, 0.0, a * squared), inside)
    if log_sum_sq is not None:
        square = tl.load(squares + row, mask=inside, other=0.0) * exp(-2 * growth)
        found_squares = log_of_squares(square, others, e_y, -log_p_y, log_sum)
        tl.store(log_sum_sq + row, tl.where(ignored, 0.0, found_squares), mask=inside)
    if mean_logit is not None:
        height = tl.load(level + row, mask=inside, other=0.0) + x_y
        tl.store(mean_logit + row, tl.where(ignored, 0.0, height / vocabulary), mask=inside)
    if predictions is not None or hits is not None:
        found = tl.load(at + row, mask=inside, other=0)
        record(predictions, row, tl.where(ignored, -1, found).to(tl.int64), inside)
        record(hits, row, tl.where((found == y) & ~ignored & ~invalid, 1.0, 0.0), inside)
