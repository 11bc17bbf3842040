"""Merge the sums of a row over all ranks, in rank order, and finish it: results, and coefficients of its gradient.

It serves tiles, products that store no logits, shards, and the backward pass from saved sums. Every rank computes the
same bits.
"""

import triton.language as tl

from xent.backends.triton.kernels.algebra import (
    activation_of,
    coefficients,
    factors,
    finish,
    gradient_factor,
    numbers_of,
    row_facts,
)
from xent.backends.triton.kernels.gradient import target_gradient
from xent.backends.triton.kernels.maths import LOG2E, NOWHERE, activate, finite, times
from xent.backends.triton.kernels.sums import column, larger, put, rebased
from xent.backends.triton.prepared import kernel

__all__ = ["DEAD", "finish_kernel"]

DEAD = tl.constexpr(-2)  # the class of a row whose gradient is 0


@kernel
def finish_kernel(
    sums,  # (ranks, K, R) float32
    rank_stride: "i64",
    ranks: "i32",
    count: "i64",  # R
    rows,
    start: "i64",  # index of the first row in `rows.order`, or in the call
    results,
    upstreams,
    saved,  # (K, N) float32, in the order of the call, or None; gets the columns that a gradient needs
    saved_row: "i64",
    made,  # (6, R) float32 or None: m, factor, the target's gradient, tilt, delta, and the bits of the target's class
    ignore_index: "i64",
    first: "i32",  # the first class of this rank
    width: "i32",
    vocabulary: "i32",
    keep: "fp32",  # 1 - e
    spread: "fp32",  # e / V
    z_loss: "fp32",
    softcap: "fp32",
    logit_scale: "fp32",
    WEIGHT: tl.constexpr,  # these are columns of `sums`, -1 if there is none
    BELOW: tl.constexpr,
    WEIGHTS: tl.constexpr,
    MIXED: tl.constexpr,
    SQUARES: tl.constexpr,
    DEFICIT: tl.constexpr,
    COUNTED: tl.constexpr,
    KEY: tl.constexpr,
    PLACE: tl.constexpr,
    ID: tl.constexpr,
    Z_LOSS: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finish `BLOCK` rows."""
    SMOOTHED: tl.constexpr = BELOW >= 0
    TILTED: tl.constexpr = upstreams.entropy is not None
    STATISTICS: tl.constexpr = TILTED or ((upstreams.lse is not None) or (upstreams.nll is not None))
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    row = start + here
    if rows.order is not None:
        row = tl.load(rows.order + row, mask=inside, other=0)
    y, a, ignored, invalid = row_facts(row, inside, rows, ignore_index, vocabulary)
    if ID >= 0:  # a target that differs between ranks is invalid on all of them
        own = tl.load(sums + ID * count + here, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        differs = own != own
        for rank in range(1, ranks):
            other = tl.load(sums + rank * rank_stride + ID * count + here, mask=inside, other=0.0)
            differs = differs | (other.to(tl.int32, bitcast=True) != own)
        ignored = ignored & ~differs
        invalid = invalid | differs
        a = tl.where(differs, 1.0, a)

    nothing = tl.zeros([BLOCK], tl.float32)
    peak = nothing - float("inf")
    z_y = nothing
    w_y = nothing
    for rank in range(ranks):
        place = sums + rank * rank_stride + here
        peak = tl.maximum(peak, tl.load(place, mask=inside, other=0.0))
        z_y += tl.load(place + 2 * count, mask=inside, other=0.0)
        w_y += column(place, count, inside, WEIGHT)
    if WEIGHT < 0:
        w_y += 1
    softcap, logit_scale = activation_of(row, inside, rows, softcap, logit_scale)
    x_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED, False)
    m = finite(tl.maximum(peak, x_y))
    rest = nothing
    below = nothing
    weights = nothing
    mixed = nothing
    squares = nothing
    deficit = nothing
    counted = nothing
    key = nothing - float("inf")
    found = tl.full([BLOCK], NOWHERE, tl.int32)
    for rank in range(ranks):
        place = sums + rank * rank_stride + here
        own_weights = column(place, count, inside, WEIGHTS)
        own_counted = column(place, count, inside, COUNTED)
        own_rest, own_below, own_mixed, own_squares, own_deficit = rebased(
            m, tl.load(place, mask=inside, other=0.0), tl.load(place + count, mask=inside, other=0.0),
            column(place, count, inside, BELOW), own_weights, column(place, count, inside, MIXED),
            column(place, count, inside, SQUARES), column(place, count, inside, DEFICIT), own_counted,
        )  # fmt: skip
        rest += own_rest
        below += own_below
        weights += own_weights
        mixed += own_mixed
        squares += own_squares
        deficit += own_deficit
        counted += own_counted
        if KEY >= 0:
            own_found = tl.load(place + PLACE * count, mask=inside, other=0.0).to(tl.int32, bitcast=True)
            key, found = larger(key, found, column(place, count, inside, KEY), own_found)
    if saved is not None:
        place = saved + row
        put(place, saved_row, inside, m, 0)
        put(place, saved_row, inside, rest, 1)
        put(place, saved_row, inside, z_y, 2)
        put(place, saved_row, inside, w_y, WEIGHT)
        put(place, saved_row, inside, weights, WEIGHTS)
        put(place, saved_row, inside, mixed, MIXED)

    keep, spread, z_loss = numbers_of(rows, vocabulary, keep, spread, z_loss)
    dead, r = gradient_factor(row, inside, a, invalid, rows, upstreams)
    total_weight = weights + w_y
    distance = x_y - m
    e2_y = distance * LOG2E
    nll, log_sum, entropy = finish(
        row, inside, y, a, w_y, dead, ignored, invalid, m, rest, e2_y, below - times(w_y, distance), total_weight,
        mixed * LOG2E, squares, m - deficit / vocabulary.to(tl.float32), found, results, keep, spread, z_loss,
        SMOOTHED, Z_LOSS, MIXED >= 0,
    )  # fmt: skip
    if made is not None:
        gamma, excess, beta, delta = coefficients(
            row, inside, r, w_y, total_weight, m + log_sum, entropy, upstreams, keep, spread, z_loss, SMOOTHED, Z_LOSS
        )
        e_y = tl.math.exp2(e2_y)
        total = rest + e_y
        factor, tilt = factors(gamma, excess, beta, log_sum, total, TILTED)
        g_y = target_gradient(
            z_y, rest, total, e_y, gamma, excess, beta, nll, delta, w_y, logit_scale, softcap, SCALED, CAPPED, TILTED
        )
        own_class = tl.where((y >= first) & (y < first + width), y - first, -1).to(tl.int32)
        own_class = tl.where(ignored if STATISTICS else dead, DEAD, own_class)
        tl.store(made + here, m, mask=inside)
        tl.store(made + count + here, factor, mask=inside)
        tl.store(made + 2 * count + here, g_y, mask=inside)
        tl.store(made + 3 * count + here, nothing + tilt, mask=inside)
        tl.store(made + 4 * count + here, delta, mask=inside)
        tl.store(made + 5 * count + here, own_class.to(tl.float32, bitcast=True), mask=inside)
