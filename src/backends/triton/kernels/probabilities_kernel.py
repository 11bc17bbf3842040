"""Loss, statistics and gradient of rows whose targets are class probabilities. One program per row.

With q' = (1-e) q + e/V, the share w_c q'_c of a class, and otherwise as in the algebra::

    l = a [sum_c w_c q'_c (lse - x_c) + zeta lse^2]
    dl/dx_c = p_c (gamma sum_k q_k + excess + beta log p_c) - delta w_c q'_c - gamma q_c

So for the algebra no class is the target: 1-e is 0, and the shares are the class weights of a smoothing with e/V = 1.
gamma is the upstream gradient of nll alone. There are three passes over a row: the largest x, the sums, the gradient.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import (
    coefficients,
    finish,
    numbers_of,
    position,
    record,
    record_nothing,
)
from xent.backends.triton.kernels.gradient import row_factors
from xent.backends.triton.kernels.maths import FLOOR, LOG2E, NOWHERE, order, times
from xent.backends.triton.kernels.sides import begin, fill_row, peak, read, write
from xent.backends.triton.prepared import kernel

__all__ = ["probabilities_kernel"]


@triton.jit
def _shares(given, stride, class_weight, classes, vocabulary, keep, spread):
    """Return q and w q' of a block of classes."""
    inside = classes < vocabulary
    q = tl.load(given + classes.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)
    w = 1.0 if class_weight is None else tl.load(class_weight + classes, mask=inside, other=0.0)
    return q, tl.where(inside, (keep * q + spread) * w, 0.0)


@kernel
def probabilities_kernel(
    logits,  # see `rows_kernel` for arguments that are not described here
    logits_inner: "i64",
    logits_outer: "i64",
    logits_row: "i64",
    grad,
    grad_inner: "i64",
    grad_outer: "i64",
    grad_row: "i64",
    rows,
    upstreams,
    results,
    start: "i64",
    vocabulary: "i32",
    softcap: "fp32",
    logit_scale: "fp32",
    probabilities,  # rows at position(row, inner, outer, row stride), classes `probabilities_class` apart
    probabilities_inner: "i64",
    probabilities_outer: "i64",
    probabilities_row: "i64",
    probabilities_class: "i64",
    limit: "i64",
    keep: "fp32",
    spread: "fp32",
    z_loss: "fp32",
    way: tl.constexpr,  # see `Way`; not ragged: rows are whole multiples of 16 bytes
):
    """See the module's docstring. `rows.target` is the row of `probabilities` that each row has; None for its own."""
    BLOCK: tl.constexpr = way.block
    PREDICTED: tl.constexpr = (results.predictions is not None) or (results.hits is not None)
    _here, row, z_row, vocabulary, logit_scale, softcap, place, facts, dead, r = begin(
        logits, logits_inner, logits_outer, logits_row, grad, grad_inner, grad_outer, grad_row, rows, upstreams, start,
        vocabulary, softcap, logit_scale, -1, limit, way,
    )  # fmt: skip
    shared, a, ignored, invalid = facts
    side = z_row, vocabulary, (logit_scale if way.scaled else None, softcap if way.capped else None)
    shared = row if rows.target is None else shared
    given = probabilities + position(shared, probabilities_inner, probabilities_outer, probabilities_row, True)
    keep, spread, z_loss = numbers_of(rows, vocabulary, keep, spread, z_loss)
    numbers = 0.0, 1.0, z_loss
    if ignored if way.all_rows else dead:
        record_nothing(row, results)
        if grad is not None:
            fill_row(place, vocabulary, 0.0, BLOCK)
    else:
        lanes = tl.arange(0, BLOCK)
        found, true = 0, 0
        if PREDICTED:
            best, likely = tl.full([BLOCK], -float("inf"), tl.float32), tl.full([BLOCK], -float("inf"), tl.float32)
            at, likely_at = lanes, lanes
            for first in range(0, vocabulary, BLOCK):
                classes = first + lanes
                inside = classes < vocabulary
                z, _x = read(side, first, BLOCK)
                key = order(z, inside, side[2])
                at = tl.where(key > best, classes, at)
                best = tl.maximum(best, key)
                q, _share = _shares(given, probabilities_class, None, classes, vocabulary, 1.0, 0.0)
                q = tl.where(inside, q, -float("inf"))
                likely_at = tl.where(q > likely, classes, likely_at)
                likely = tl.maximum(likely, q)
            found = tl.min(tl.where(best == tl.max(best, 0), at, NOWHERE), 0)
            true = tl.min(tl.where(likely == tl.max(likely, 0), likely_at, NOWHERE), 0)
        m = peak(side, BLOCK)
        sums = tl.zeros([BLOCK], tl.float32)
        mixed, squares, level, shares, costs, mass, raw = sums, sums, sums, sums, sums, sums, sums
        for first in range(0, vocabulary, BLOCK):
            classes = first + lanes
            _z, x = read(side, first, BLOCK)
            q, share = _shares(given, probabilities_class, rows.class_weight, classes, vocabulary, keep, spread)
            e2 = (x - m) * LOG2E
            e = tl.math.exp2(e2)
            sums += e
            mixed += e * tl.maximum(e2, FLOOR)
            squares += e * e
            level += tl.where(classes < vocabulary, x, 0.0)
            shares += share
            costs += times(share, m - x)
            mass += q
            raw += times(q, m - x)
        total, total_share, all_q = tl.sum(sums, 0), tl.sum(shares, 0), tl.sum(mass, 0)
        nowhere = tl.full((), -float("inf"), tl.float32)
        nll, log_sum, entropy = finish(
            row, None, (true, a, ignored, invalid), dead, 1.0, m, total, nowhere, tl.sum(costs, 0), total_share,
            tl.sum(mixed, 0), tl.sum(squares, 0), tl.sum(level, 0) / vocabulary, found, results, numbers, True,
            way.z_loss, True,
        )  # fmt: skip
        record(results.nll, row, None, all_q * log_sum + tl.sum(raw, 0))
        if grad is not None:
            gamma, excess, beta, delta = coefficients(
                row, None, r, 1.0, total_share, m + log_sum, entropy, upstreams, numbers, True, way.z_loss
            )
            factor, tilt, _g_y = row_factors(
                gamma * all_q, excess, beta, delta, m, 1.0, total, nowhere, nll, log_sum, side[2], way.tilted
            )
            if dead & ((upstreams.lse is None) and ((upstreams.nll is None) and (not way.tilted))):
                fill_row(place, vocabulary, 0.0, BLOCK)
            else:
                for first in range(0, vocabulary, BLOCK):
                    classes = first + lanes
                    z, x = read(side, first, BLOCK)
                    q, share = _shares(given, probabilities_class, rows.class_weight, classes, vocabulary, keep, spread)
                    e2 = (x - m) * LOG2E
                    g = tl.math.exp2(e2) * (tl.fma(tl.maximum(e2, FLOOR), tilt, factor) if way.tilted else factor)
                    write(place, first, side, z, g - delta * share - gamma * q, BLOCK)
