"""Merge the sums of all ranks, and compute results and gradient coefficients of rows. One launch per part.

`shard_land_kernel` computes the same as `xent.backends.torch.sharded.sums.merge` and
`xent.backends.torch.sharded.finish`, which have the formulas, for targets that are class indices. `shard_again_kernel`
computes the coefficients from saved data. Every program adds the ranks in rank order, so that all ranks get the same
bits.
"""

import triton
import triton.language as tl

from xent.backends.triton.launch import kernel
from xent.backends.triton.maths import NOWHERE, activate, exp, finite, log1p, slope, times
from xent.backends.triton.row_algebra import bend_of_row
from xent.backends.triton.row_results import record

__all__ = ["shard_again_kernel", "shard_land_kernel"]


@triton.jit
def _expm1(x):
    """Return e^x - 1 as (w - 1) x / log(w) with w = e^x, in which the rounding error of w cancels."""
    w = exp(x)
    near = (w != 1) & (w > 0.5)
    return tl.where(near, (w - 1) * (x / tl.where(near, tl.log(w), 1.0)), tl.where(w == 1, x, w - 1))


@triton.jit
def _write_coefficients(
    coefficients, count, here, inside, peak, log_sum, log_p, z_y, r, w_y, total_weight, of_lse, of_nll, of_entropy,
    entropy, keep, spread, z_loss, softcap, logit_scale,
    TILTED: tl.constexpr, SMOOTHED: tl.constexpr, Z_LOSS: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Write peak, log_sum, alpha, the target's gradient, beta and delta of some rows to (6, R)."""
    gamma = r * keep * w_y + of_nll
    excess = of_lse
    if Z_LOSS:
        excess += 2 * z_loss * r * (peak + log_sum)
    if TILTED:
        excess -= of_entropy * entropy
    delta = r * spread
    if SMOOTHED:
        excess += delta * total_weight
    p = exp(log_p)
    g = gamma * _expm1(log_p) + p * excess
    if TILTED:
        g -= times(p, of_entropy * log_p)
    if SMOOTHED:
        g -= delta * w_y
    if SCALED or CAPPED:
        g *= slope(z_y, logit_scale, softcap, SCALED, CAPPED, False)
    place = coefficients + here
    tl.store(place, peak, mask=inside)
    tl.store(place + count, log_sum, mask=inside)
    tl.store(place + 2 * count, gamma + excess, mask=inside)
    tl.store(place + 3 * count, g, mask=inside)
    if TILTED:
        tl.store(place + 4 * count, -of_entropy, mask=inside)
    if SMOOTHED:
        tl.store(place + 5 * count, delta, mask=inside)


@triton.jit
def _upstream(of_row, row, stride, inside, like):
    """Return the upstream gradients of some rows; 0 if there are none."""
    if of_row is None:
        return like * 0
    else:
        return tl.load(of_row + row * stride, mask=inside, other=0.0)


@kernel
def shard_land_kernel(
    sums,  # (ranks, K, R) float32
    rank_stride: "i64",
    ranks: "i32",
    count: "i64",  # R
    bounds,  # (ranks, 2) int64: range [first, stop) of each rank's classes
    rank_weights,  # (ranks,) float32: the sum of each rank's class weights; or None
    row_weight,  # (N,) float32, in the order of the call, or None
    total_weight,  # () float32 or None
    rows,  # (R,) int64: indices of the rows in the call; None for start, start + 1, ...
    start: "i64",
    target,  # (N,) int64; this and the next three are in computation order
    weight,  # float32
    scale,  # float32
    dead,  # bool or None
    loss,  # float32; all results are in computation order
    lse,  # or None; the same for the next ones
    nll,
    entropy,
    predictions,  # int64
    log_sum_sq,
    mean_logit,
    z_term,
    kept,  # (K', N) float32, in the order of the call; or None
    kept_row: "i64",  # stride of its rows
    length: "i64",  # number of rows that are computed
    coefficients,  # (6, R) float32 or None
    classes: "i64",  # V, the classes of all ranks
    keep: "fp32",
    spread: "fp32",
    z_loss: "fp32",
    softcap: "fp32",
    logit_scale: "fp32",
    bend,
    bend_stride: "i64",
    BELOW: tl.constexpr,  # these are slots of `sums`, -1 if not needed
    MIXED: tl.constexpr,
    SQUARES: tl.constexpr,
    DEFICIT: tl.constexpr,
    KEY: tl.constexpr,
    Z_LOSS: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the sums of `BLOCK` rows, and store results and coefficients."""
    SMOOTHED: tl.constexpr = BELOW >= 0
    WEIGHED: tl.constexpr = row_weight is not None
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    row = start + here
    of_call = row
    if rows is not None:
        of_call = tl.load(rows + here, mask=inside, other=0)
    y = tl.load(target + row, mask=inside, other=0)
    nothing = tl.zeros([BLOCK], tl.float32)
    w_y = nothing + 1
    weights = nothing + classes.to(tl.float32)
    if WEIGHED:
        w_y = tl.load(row_weight + of_call, mask=inside, other=1.0)
        weights = nothing + tl.load(total_weight)

    z_y = nothing
    largest = nothing - float("inf")
    for rank in range(ranks):
        slots = sums + rank * rank_stride + here
        largest = tl.maximum(largest, tl.load(slots, mask=inside, other=0.0))
        z_y += tl.load(slots + 2 * count, mask=inside, other=0.0)
    softcap, logit_scale = bend_of_row(row, bend, bend_stride, softcap, logit_scale, length, 0, False)
    x_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED, False)
    peak = tl.maximum(largest, x_y)
    reference = finite(peak)
    others = nothing
    below = nothing
    mixed = nothing
    squares = nothing
    deficit = nothing
    best = nothing - float("inf")
    found = tl.full([BLOCK], NOWHERE, tl.int32)
    for rank in range(ranks):
        slots = sums + rank * rank_stride + here
        own_peak = tl.load(slots, mask=inside, other=0.0)
        total = tl.load(slots + count, mask=inside, other=0.0)
        factor = exp(own_peak - reference)
        growth = reference - finite(own_peak)
        others += total * factor
        if SMOOTHED or DEFICIT >= 0:
            first = tl.load(bounds + 2 * rank)
            stop = tl.load(bounds + 2 * rank + 1)
            counted = (stop - first).to(tl.float32)
        if SMOOTHED:
            owned = (y >= first) & (y < stop)
            here_weight = counted
            if WEIGHED:
                here_weight = tl.load(rank_weights + rank)
            rest = here_weight - tl.where(owned, w_y, 0.0)
            below += tl.load(slots + BELOW * count, mask=inside, other=0.0) + times(rest, growth)
        if MIXED >= 0:
            mixed += factor * (tl.load(slots + MIXED * count, mask=inside, other=0.0) - growth * total)
        if SQUARES >= 0:
            squares += factor * factor * tl.load(slots + SQUARES * count, mask=inside, other=0.0)
        if DEFICIT >= 0:
            deficit += tl.load(slots + DEFICIT * count, mask=inside, other=0.0) + counted * growth
        if KEY >= 0:
            key = tl.load(slots + KEY * count, mask=inside, other=0.0)
            place = tl.load(slots + (KEY + 1) * count, mask=inside, other=0.0).to(tl.int32, bitcast=True)
            found = tl.where(key > best, place, tl.where(key == best, tl.minimum(found, place), found))
            best = tl.maximum(best, key)

    distance = x_y - reference
    own = exp(distance)
    total = others + own
    # If the target is the largest, use log1p of the sum of the others, which keeps precision if that sum is small.
    log_sum = tl.where(x_y == peak, log1p(others), tl.log(total))
    log_p = distance - log_sum
    row_lse = peak + log_sum
    row_entropy = nothing
    if MIXED >= 0:
        row_entropy = log_sum - (mixed + times(own, distance)) / total
    cost = times(keep * w_y, -log_p)
    if SMOOTHED:
        cost += spread * (weights * log_sum + below + times(w_y, -distance))
    a = tl.load(weight + row, mask=inside, other=0.0)
    alive = inside
    if dead is not None:
        alive = inside & (tl.load(dead + row, mask=inside, other=0) == 0)
    squared = a * z_loss * row_lse * row_lse
    row_loss = a * cost
    if Z_LOSS:
        row_loss += squared
    tl.store(loss + row, tl.where(alive, row_loss, 0.0), mask=inside)
    record(z_term, row, tl.where(alive, squared, 0.0), inside)
    record(lse, row, row_lse, inside)
    record(nll, row, -log_p, inside)
    record(entropy, row, row_entropy, inside)
    record(predictions, row, found.to(tl.int64), inside)
    record(log_sum_sq, row, tl.log(squares + own * own) - 2 * log_sum, inside)
    record(mean_logit, row, reference - deficit / classes.to(tl.float32), inside)
    if kept is not None:
        tl.store(kept + of_call, peak, mask=inside)
        tl.store(kept + kept_row + of_call, log_sum, mask=inside)
        tl.store(kept + 2 * kept_row + of_call, log_p, mask=inside)
        tl.store(kept + 3 * kept_row + of_call, z_y, mask=inside)
        if WEIGHED:
            tl.store(kept + 4 * kept_row + of_call, w_y, mask=inside)
            tl.store(kept + 5 * kept_row + of_call, weights, mask=inside)
        if MIXED >= 0:
            tl.store(kept + (6 if WEIGHED else 4) * kept_row + of_call, row_entropy, mask=inside)
    if coefficients is not None:
        _write_coefficients(
            coefficients, count, here, inside, peak, log_sum, log_p, z_y, tl.load(scale + row, mask=inside, other=0.0),
            w_y, weights, nothing, nothing, nothing, row_entropy, keep, spread, z_loss, softcap, logit_scale,
            False, SMOOTHED, Z_LOSS, CAPPED, SCALED,
        )  # fmt: skip


@kernel
def shard_again_kernel(
    kept,  # (K', N) float32, in the order of the call
    kept_row: "i64",
    length: "i64",
    rows,  # see `shard_land_kernel` for arguments that are not described here
    start: "i64",
    count: "i64",
    scale,
    lse_upstream,  # (N,) float32 or None, in computation order, like the next two
    lse_stride: "i64",
    nll_upstream,
    nll_stride: "i64",
    entropy_upstream,
    entropy_stride: "i64",
    coefficients,
    classes: "i64",
    keep: "fp32",
    spread: "fp32",
    z_loss: "fp32",
    softcap: "fp32",
    logit_scale: "fp32",
    bend,
    bend_stride: "i64",
    WEIGHED: tl.constexpr,  # whether `kept` has class weights
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the coefficients of `BLOCK` rows, with the upstream gradients of their statistics."""
    TILTED: tl.constexpr = entropy_upstream is not None
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    row = start + here
    of_call = row
    if rows is not None:
        of_call = tl.load(rows + here, mask=inside, other=0)
    place = kept + of_call
    peak = tl.load(place, mask=inside, other=0.0)
    w_y = tl.zeros([BLOCK], tl.float32) + 1
    weights = tl.zeros([BLOCK], tl.float32) + classes.to(tl.float32)
    if WEIGHED:
        w_y = tl.load(place + 4 * kept_row, mask=inside, other=1.0)
        weights = tl.load(place + 5 * kept_row, mask=inside, other=0.0)
    entropy = peak
    if TILTED:
        entropy = tl.load(place + (6 if WEIGHED else 4) * kept_row, mask=inside, other=0.0)
    softcap, logit_scale = bend_of_row(row, bend, bend_stride, softcap, logit_scale, length, 0, False)
    _write_coefficients(
        coefficients, count, here, inside, peak, tl.load(place + kept_row, mask=inside, other=0.0),
        tl.load(place + 2 * kept_row, mask=inside, other=0.0), tl.load(place + 3 * kept_row, mask=inside, other=0.0),
        tl.load(scale + row, mask=inside, other=0.0), w_y, weights,
        _upstream(lse_upstream, row, lse_stride, inside, w_y), _upstream(nll_upstream, row, nll_stride, inside, w_y),
        _upstream(entropy_upstream, row, entropy_stride, inside, w_y), entropy, keep, spread, z_loss, softcap,
        logit_scale, TILTED, SMOOTHED, Z_LOSS, CAPPED, SCALED,
    )  # fmt: skip
