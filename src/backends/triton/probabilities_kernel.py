"""Loss, statistics and gradient of rows whose targets are class probabilities. One program per row.

With q' = (1-e) q + e/V and the row algebra's sums (`row_algebra`)::

    l = a [sum_c w_c q'_c (lse - x_c) + zeta lse^2]
    dl/dx_c = p_c (excess + beta log p_c) - r w_c q'_c - n q_c        excess = r (sum_c w_c q'_c + 2 zeta lse)

Upstream gradients u of lse, n of nll and v of the entropy H add u + n sum_c q_c - v H to excess, and beta is -v.

Four passes over a row: the largest x, the sum of exponentials, the other sums, and the gradient. The last two read both
logits and probabilities.
"""

import triton
import triton.language as tl

from xent.backends.triton.launch import kernel
from xent.backends.triton.maths import NOWHERE, activate, exp, finite, order, slope, times
from xent.backends.triton.row_algebra import bend_of_row, gradient_factor, position, row_facts, with_statistics
from xent.backends.triton.row_results import record, store_nothing

__all__ = ["probabilities_kernel"]


@triton.jit
def _shares(probabilities, stride, class_weight, classes, vocabulary, keep, spread):
    """Return q and w q' of a block of classes."""
    inside = classes < vocabulary
    q = tl.load(probabilities + classes.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)
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
    order_of_rows,
    start: "i64",
    probabilities,  # rows at position(row, inner, outer, row stride), classes `probabilities_class` apart
    probabilities_inner: "i64",
    probabilities_outer: "i64",
    probabilities_row: "i64",
    probabilities_class: "i64",
    sample_weight,
    class_weight,
    upstream,
    upstream_stride: "i64",
    lse_upstream,
    lse_upstream_stride: "i64",
    nll_upstream,
    nll_upstream_stride: "i64",
    entropy_upstream,
    entropy_upstream_stride: "i64",
    scratch,
    loss,
    lse,
    nll,
    entropy,
    predictions,
    hits,
    z_term,
    log_sum_sq,
    mean_logit,
    count: "i64",
    length: "i64",
    shift: "i64",
    vocabulary: "i32",
    keep: "fp32",
    spread: "fp32",
    z_loss: "fp32",
    softcap: "fp32",
    logit_scale: "fp32",
    bend,
    bend_stride: "i64",
    SHIFTED: tl.constexpr,
    GROUPED: tl.constexpr,  # rows are in several groups, see `position`
    MEAN: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row, see the module's docstring. If `loss` is None, only the gradient is stored."""
    TILTED: tl.constexpr = entropy_upstream is not None
    STATISTICS: tl.constexpr = TILTED or ((lse_upstream is not None) or (nll_upstream is not None))
    here = tl.program_id(0).to(tl.int64)
    row = start + here
    if order_of_rows is not None:
        row = tl.load(order_of_rows + row)
    _y, a, _w, ignored, invalid = row_facts(
        row, row < count, None, sample_weight, class_weight, length, shift, 0, vocabulary, SHIFTED, True
    )
    softcap, logit_scale = bend_of_row(row, bend, bend_stride, softcap, logit_scale, count, shift, SHIFTED)
    inverse = 1.0
    if MEAN:
        inverse = tl.load(scratch + 1)
    dead, r = gradient_factor(a, inverse, invalid, row, upstream, upstream_stride, STATISTICS)
    source = logits + position(here, logits_inner, logits_outer, logits_row, GROUPED)
    shared = probabilities + position(row + shift, probabilities_inner, probabilities_outer, probabilities_row, GROUPED)
    lanes = tl.arange(0, BLOCK)
    if (ignored if ALL_ROWS else dead) != 0:
        record(loss, row, 0.0)
        store_nothing(row, lse, nll, entropy, predictions, hits, z_term, log_sum_sq, mean_logit)
        if grad is not None:
            place = grad + position(here, grad_inner, grad_outer, grad_row, GROUPED)
            for first in range(0, vocabulary, BLOCK):
                zero = tl.zeros([BLOCK], grad.dtype.element_ty)
                tl.store(place + first + lanes, zero, mask=first + lanes < vocabulary)
    else:
        peaks = tl.full([BLOCK], -float("inf"), tl.float32)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        at = tl.zeros([BLOCK], tl.int32)
        likely = tl.full([BLOCK], -float("inf"), tl.float32)
        likely_at = tl.zeros([BLOCK], tl.int32)
        for first in range(0, vocabulary, BLOCK):
            classes = first + lanes
            inside = classes < vocabulary
            z = tl.load(source + classes, mask=inside, other=-float("inf")).to(tl.float32)
            x = activate(z, logit_scale, softcap, SCALED, CAPPED, False)
            peaks = tl.maximum(peaks, tl.where(inside, x, -float("inf")))
            if predictions is not None or hits is not None:
                key = order(z, inside, logit_scale, SCALED)
                at = tl.where(key > best, classes, at)
                best = tl.maximum(best, key)
            if hits is not None:
                q, _share = _shares(shared, probabilities_class, class_weight, classes, vocabulary, keep, spread)
                q = tl.where(inside, q, -float("inf"))
                likely_at = tl.where(q > likely, classes, likely_at)
                likely = tl.maximum(likely, q)
        m = finite(tl.max(peaks, 0))
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, vocabulary, BLOCK):
            classes = first + lanes
            inside = classes < vocabulary
            z = tl.load(source + classes, mask=inside, other=-float("inf")).to(tl.float32)
            x = activate(z, logit_scale, softcap, SCALED, CAPPED, False)
            sums += exp(tl.where(inside, x, -float("inf")) - m)
        log_sum = tl.log(tl.sum(sums, 0))
        costs = tl.zeros([BLOCK], tl.float32)
        raw = tl.zeros([BLOCK], tl.float32)
        mixed = tl.zeros([BLOCK], tl.float32)
        shares = tl.zeros([BLOCK], tl.float32)
        squares = tl.zeros([BLOCK], tl.float32)
        level = tl.zeros([BLOCK], tl.float32)
        mass = tl.zeros([BLOCK], tl.float32)
        for first in range(0, vocabulary, BLOCK):
            classes = first + lanes
            inside = classes < vocabulary
            z = tl.load(source + classes, mask=inside, other=-float("inf")).to(tl.float32)
            x = activate(z, logit_scale, softcap, SCALED, CAPPED, False)
            q, share = _shares(shared, probabilities_class, class_weight, classes, vocabulary, keep, spread)
            log_p = (tl.where(inside, x, -float("inf")) - m) - log_sum
            costs -= times(share, log_p)
            shares += share
            if nll is not None:
                raw -= times(q, log_p)
            if TILTED or (entropy is not None):
                mixed -= times(exp(log_p), log_p)
            if nll_upstream is not None:
                mass += q
            if log_sum_sq is not None:
                squares += exp(2 * log_p)
            if mean_logit is not None:
                level += tl.where(inside, x, 0.0)
        row_lse = m + log_sum
        total_share = tl.sum(shares, 0)
        squared = z_loss * row_lse * row_lse
        record(loss, row, tl.where(dead, 0.0, a * (tl.sum(costs, 0) + squared)))
        record(lse, row, row_lse)
        record(nll, row, tl.sum(raw, 0))
        record(entropy, row, tl.sum(mixed, 0))
        record(z_term, row, tl.where(dead, 0.0, a * squared))
        record(log_sum_sq, row, tl.log(tl.sum(squares, 0)))
        record(mean_logit, row, tl.sum(level, 0) / vocabulary)
        if predictions is not None or hits is not None:
            top = tl.max(best, 0)
            found = tl.min(tl.where(best == top, at, NOWHERE), 0)
            record(predictions, row, found.to(tl.int64))
            if hits is not None:
                likeliest = tl.max(likely, 0)
                true = tl.min(tl.where(likely == likeliest, likely_at, NOWHERE), 0)
                tl.store(hits + row, tl.where(found == true, 1.0, 0.0))
        if grad is not None:
            place = grad + position(here, grad_inner, grad_outer, grad_row, GROUPED)
            n, excess, beta = with_statistics(
                0.0, r * (total_share + 2 * z_loss * row_lse), row, tl.sum(mixed, 0), lse_upstream,
                lse_upstream_stride, nll_upstream, nll_upstream_stride, entropy_upstream, entropy_upstream_stride,
            )  # fmt: skip
            if nll_upstream is not None:
                excess += n * tl.sum(mass, 0)
            for first in range(0, vocabulary, BLOCK):
                classes = first + lanes
                inside = classes < vocabulary
                z = tl.load(source + classes, mask=inside, other=-float("inf")).to(tl.float32)
                x = activate(z, logit_scale, softcap, SCALED, CAPPED, False)
                q, share = _shares(shared, probabilities_class, class_weight, classes, vocabulary, keep, spread)
                log_p = (x - m) - log_sum
                g = excess * exp(log_p) - r * share
                if TILTED:
                    g += beta * times(exp(log_p), log_p)
                if nll_upstream is not None:
                    g -= n * q
                if CAPPED or SCALED:
                    g *= slope(z, logit_scale, softcap, SCALED, CAPPED, False)
                if not STATISTICS:
                    g = tl.where(dead, 0.0, g)
                tl.store(place + classes, g.to(grad.dtype.element_ty), mask=inside)
