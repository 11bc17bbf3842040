"""The forward pass over tiles of logits, as they are made, small enough to be in the L2 cache still.

A tile has some thousand rows and classes. It is made by a matrix product and read once, from cache, to carry on each
row's sums; then, where nothing needs its logits again, the next tile takes its memory. With m the largest x so far, the
sums are::

    total = sum_c exp(x_c - m)
    mixed = sum_c exp(x_c - m) (m - x_c)                    entropy = log total + mixed / total
    below = sum_c w_c (m - x_c),  seen = sum_c w_c          sum_c w_c (-log p_c) = seen log total + below

All terms are positive, so nothing cancels. A larger m adds its growth to each m - x_c. The target comes last, from its
float32 logit: the tiles' sums are over the other classes.
"""

import triton
import triton.language as tl

from xent.backends.triton.maths import (
    activate,
    add_exponentials,
    exp,
    in_lanes,
    join_lanes,
    lowest_of_largest,
    merge,
    order,
    times,
    with_target,
)

__all__ = ["finish_kernel", "join_kernel", "tile_kernel"]


_PER_ROW = ["target", "peaks", "totals", "best", "predictions", "mixed", "below", "seen"]


@triton.jit(do_not_specialize=["start", "first"], do_not_specialize_on_alignment=_PER_ROW)
def tile_kernel(
    tile,  # (R, width): classes first, first + 1, ... of rows start, start + 1, ...
    tile_stride,
    width,
    start,
    first,
    target,  # (N,)
    peaks,  # (N,), like all below
    totals,
    best,  # None unless predictions are asked for
    predictions,
    mixed,  # None unless the entropy is asked for
    below,  # None without smoothing
    seen,
    class_weight,
    softcap,
    logit_scale,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Carry one row's sums over a tile."""
    tile += tl.program_id(0).to(tl.int64) * tile_stride
    row = start + tl.program_id(0).to(tl.int64)
    y = tl.load(target + row) - first
    peak = -float("inf")
    total = 0.0
    top = -float("inf")
    prediction = 0
    mix = 0.0
    under = 0.0
    weights = 0.0
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
            prediction = tl.load(predictions + row).to(tl.int32)
    peak_lanes = tl.full([LANES], -float("inf"), tl.float32)
    total_lanes = tl.zeros([LANES], tl.float32)
    for left in range(0, width, BLOCK):
        columns = left + tl.arange(0, BLOCK)
        inside = columns < width
        z = tl.load(tile + columns, mask=inside, other=0.0).to(tl.float32)
        if best is not None:
            largest, at = lowest_of_largest(order(z, inside, logit_scale), first + columns)
            prediction = tl.where(largest > top, at, prediction)
            top = tl.maximum(top, largest)
        x, _slope = activate(z, logit_scale, softcap, SCALED, CAPPED)
        if (left + BLOCK > width) | ((y >= left) & (y < left + BLOCK)):
            x = tl.where(inside & (columns != y), x, -float("inf"))
        if mixed is None and below is None:
            peak_lanes, total_lanes = add_exponentials(peak_lanes, total_lanes, in_lanes(x, LANES, True))
        else:
            none = tl.full([LANES], -float("inf"), tl.float32)
            lane_peak, lane_total = add_exponentials(none, tl.zeros([LANES], tl.float32), in_lanes(x, LANES, True))
            old_peak, old_total = peak, total
            block_peak, block_total = join_lanes(lane_peak, lane_total)
            peak, total = merge(peak, total, block_peak, block_total)
            growth = tl.where(old_peak == -float("inf"), 0.0, peak - old_peak)
            depth = tl.where(x == peak, 0.0, peak - x)
            if mixed is not None:
                mix = exp(-growth) * (mix + growth * old_total) + tl.sum(times(exp(-depth), depth), 0)
            if below is not None:
                w = 1.0 if class_weight is None else tl.load(class_weight + first + columns, mask=inside, other=0.0)
                w = tl.where(inside & (columns != y), w, 0.0)
                # Columns of -inf alone have no largest to grow from: those with a weight are infinitely far below any.
                under += times(weights, tl.where(old_peak == -float("inf"), float("inf"), growth))
                under += tl.sum(times(w, depth), 0)
                weights += tl.sum(w, 0)
    if mixed is None and below is None:
        tile_peak, tile_total = join_lanes(peak_lanes, total_lanes)
        peak, total = merge(peak, total, tile_peak, tile_total)
    if mixed is not None:
        tl.store(mixed + row, mix)
    if below is not None:
        tl.store(below + row, under)
        tl.store(seen + row, weights)
    tl.store(peaks + row, peak)
    tl.store(totals + row, total)
    if best is not None:
        tl.store(best + row, top)
        tl.store(predictions + row, tl.cast(prediction, tl.int64))


@triton.jit(do_not_specialize=["rows", "parts"], do_not_specialize_on_alignment=["peaks", "totals"])
def join_kernel(
    part_peaks,  # (parts, R)
    part_totals,
    peaks,  # (R,)
    totals,
    rows,
    parts,
    BLOCK: tl.constexpr,
):
    """Make the sums of a block of rows from those over parts of the classes."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        place = part * rows + row
        part_peak = tl.load(part_peaks + place, mask=inside, other=-float("inf"))
        peak, total = merge(peak, total, part_peak, tl.load(part_totals + place, mask=inside, other=0.0))
    tl.store(peaks + row, peak, mask=inside)
    tl.store(totals + row, total, mask=inside)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_PER_ROW + ["log_sums"])
def finish_kernel(
    count,
    peaks,
    totals,
    mixed,
    below,
    seen,
    target,
    target_logits,
    weight,
    dead,
    class_weight,
    loss,
    log_sums,
    lse,
    nll,
    entropy,
    z_term,
    keep,  # 1 - e
    spread,  # e / V
    z_loss,
    softcap,
    logit_scale,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn the sums of a block of rows into their results."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    z_y = tl.load(target_logits + rows, mask=inside, other=0.0)
    x_y, _slope_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED)
    others_peak = tl.load(peaks + rows, mask=inside, other=0.0)
    others_total = tl.load(totals + rows, mask=inside, other=1.0)
    peak, log_sum = with_target(others_peak, others_total, x_y)
    growth = tl.where(others_peak == -float("inf"), 0.0, peak - others_peak)
    depth_y = tl.where(x_y == peak, 0.0, peak - x_y)
    a = tl.load(weight + rows, mask=inside, other=0.0)
    is_dead = tl.load(dead + rows, mask=inside, other=0) != 0
    w_y = tl.full([BLOCK], 1.0, tl.float32)
    if class_weight is not None:
        w_y = tl.load(class_weight + tl.load(target + rows, mask=inside, other=0), mask=inside, other=0.0)
    log_p_y = (x_y - peak) - log_sum
    cost = -times(keep * w_y, log_p_y)
    if nll is not None:
        tl.store(nll + rows, -log_p_y, mask=inside)
    if below is not None:
        weights = tl.load(seen + rows, mask=inside, other=0.0)
        under = tl.load(below + rows, mask=inside, other=0.0)
        under += times(weights, tl.where(others_peak == -float("inf"), float("inf"), growth)) + times(w_y, depth_y)
        cost += spread * ((weights + w_y) * log_sum + under)
    if entropy is not None:
        mix = tl.load(mixed + rows, mask=inside, other=0.0)
        mix = exp(-growth) * (mix + growth * others_total) + times(exp(-depth_y), depth_y)
        tl.store(entropy + rows, log_sum + mix * exp(-log_sum), mask=inside)
    squared = z_loss * (peak + log_sum) * (peak + log_sum)
    if Z_LOSS:
        cost += squared
    tl.store(loss + rows, tl.where(is_dead, 0.0, a * cost), mask=inside)
    if z_term is not None:
        tl.store(z_term + rows, tl.where(is_dead, 0.0, a * squared), mask=inside)
    if log_sums is not None:
        tl.store(peaks + rows, peak, mask=inside)
        tl.store(log_sums + rows, log_sum, mask=inside)
    if lse is not None:
        tl.store(lse + rows, peak + log_sum, mask=inside)
