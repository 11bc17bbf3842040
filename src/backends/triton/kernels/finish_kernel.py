"""Merge the sums of a row over all ranks, in rank order, and finish it: results, and coefficients of its gradient.

It serves tiles, products that store no logits, shards, and the backward pass from saved sums. Every rank computes the
same bits.
"""

import triton.language as tl

from xent.backends.triton.kernels.algebra import (
    activation_of,
    coefficients,
    finish,
    gradient_factor,
    numbers_of,
    row_at,
    row_facts,
)
from xent.backends.triton.kernels.gradient import row_factors
from xent.backends.triton.kernels.maths import LOG2E, NOWHERE, activate, finite, times
from xent.backends.triton.kernels.sums import column, larger, load_sums, put
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
    columns: tl.constexpr,  # see `Columns`
    way: tl.constexpr,  # see `Way`
    BLOCK: tl.constexpr,
):
    """Finish `BLOCK` rows."""
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    row = row_at(start + here, inside, rows)
    y, a, ignored, invalid = row_facts(row, inside, rows, ignore_index, vocabulary)
    if columns.id >= 0:  # a target that differs between ranks is invalid on all of them
        own = tl.load(sums + columns.id * count + here, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        differs = own != own
        for rank in range(1, ranks):
            other = tl.load(sums + rank * rank_stride + columns.id * count + here, mask=inside, other=0.0)
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
        w_y += column(place, count, inside, columns.row_weight)
    if columns.row_weight < 0:
        w_y += 1
    softcap, logit_scale = activation_of(row, inside, rows, softcap, logit_scale)
    bend = logit_scale if way.scaled else None, softcap if way.capped else None
    x_y = activate(z_y, bend, False)
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
        own_rest, own_below, own_mixed, own_squares, own_deficit, own_weights, own_counted = load_sums(
            place, count, inside, m, columns
        )
        rest += own_rest
        below += own_below
        weights += own_weights
        mixed += own_mixed
        squares += own_squares
        deficit += own_deficit
        counted += own_counted
        if columns.key >= 0:
            own_found = tl.load(place + columns.place * count, mask=inside, other=0.0).to(tl.int32, bitcast=True)
            key, found = larger(key, found, column(place, count, inside, columns.key), own_found)
    if saved is not None:
        place = saved + row
        put(place, saved_row, inside, m, 0)
        put(place, saved_row, inside, rest, 1)
        put(place, saved_row, inside, z_y, 2)
        put(place, saved_row, inside, w_y, columns.row_weight)
        put(place, saved_row, inside, weights, columns.weights)
        put(place, saved_row, inside, mixed, columns.mixed)

    numbers = numbers_of(rows, vocabulary, keep, spread, z_loss)
    dead, r = gradient_factor(row, inside, a, invalid, rows, upstreams)
    total_weight = weights + w_y
    distance = x_y - m
    e2_y = distance * LOG2E
    nll, log_sum, entropy = finish(
        row, inside, (y, a, ignored, invalid), dead, w_y, m, rest, e2_y, below - times(w_y, distance), total_weight,
        mixed * LOG2E, squares, m - deficit / vocabulary.to(tl.float32), found, results, numbers, way.smoothed,
        way.z_loss, columns.mixed >= 0,
    )  # fmt: skip
    if made is not None:
        gamma, excess, beta, delta = coefficients(
            row, inside, r, w_y, total_weight, m + log_sum, entropy, upstreams, numbers, way.smoothed, way.z_loss
        )
        factor, tilt, g_y = row_factors(
            gamma, excess, beta, delta, z_y, w_y, rest, e2_y, nll, log_sum, bend, way.tilted
        )
        own_class = tl.where((y >= first) & (y < first + width), y - first, -1).to(tl.int32)
        own_class = tl.where(ignored if way.statistics else dead, DEAD, own_class)
        tl.store(made + here, m, mask=inside)
        tl.store(made + count + here, factor, mask=inside)
        tl.store(made + 2 * count + here, g_y, mask=inside)
        tl.store(made + 3 * count + here, nothing + tilt, mask=inside)
        tl.store(made + 4 * count + here, delta, mask=inside)
        tl.store(made + 5 * count + here, own_class.to(tl.float32, bitcast=True), mask=inside)
