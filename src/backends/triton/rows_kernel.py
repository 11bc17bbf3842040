"""The row kernel in plain Triton, for every option: a row is read once for the losses and once for the gradient.

With x, e, w, a as in `xent.cross_entropy`, r the row's factor of the gradient, and W = sum_c w_c::

    log p = x - max x - log sum_c exp(x_c - max x)
    l     = a [ (1-e) w_y (-log p_y) + (e/V) sum_c w_c (-log p_c) + zeta lse^2 ]
    dl/dz = r [ ((1-e) w_y + (e/V) W + 2 zeta lse) p - (1-e) w_y [c==y] - (e/V) w_c ] dx/dz

For the target the bracket is w_y (1-e) (p_y - 1) and the rest, with p_y - 1 = expm1(log p_y).
For class probabilities q, w_c ((1-e) q_c + e/V) stands for both shares of class c, and their sum for the bracket's
first two terms. What has no share is 0 even where its log p is -inf.

The second look at a row begins at its end, which the caches still hold.
"""

import triton
import triton.language as tl

from xent.backends.triton.maths import (
    activate,
    add_exponentials,
    exp,
    expm1,
    in_lanes,
    join_lanes,
    lowest_of_largest,
    order,
    times,
    with_target,
)

__all__ = ["rows_kernel"]


@triton.jit
def _load(row, first, vocabulary, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Return a block of a row, -inf where it has nothing."""
    columns = first + tl.arange(0, BLOCK)
    return tl.load(row + columns, mask=columns < vocabulary, other=-float("inf"), eviction_policy=POLICY)


@triton.jit
def _store(row, columns, values, vocabulary):
    tl.store(row + columns, values.to(row.dtype.element_ty), mask=columns < vocabulary, cache_modifier=".cs")


@triton.jit
def _shares(probabilities, probability_class, class_weight, columns, vocabulary, keep, spread):
    """Return probabilities q and shares w ((1-e) q + e/V) of a block of classes; without probabilities, q is 0."""
    inside = columns < vocabulary
    q = tl.zeros([columns.shape[0]], tl.float32)
    if probabilities is not None:
        places = probabilities + columns.to(tl.int64) * probability_class
        q = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    w = 1.0 if class_weight is None else tl.load(class_weight + columns, mask=inside, other=0.0)
    return q, tl.where(inside, (keep * q + spread) * w, 0.0)


_PER_ROW = [  # a number a row each: nothing is gained by knowing how they are aligned, and compiling again is lost
    "target",
    "weight",
    "scale",
    "dead",
    "target_logits",
    "class_weight_total",
    "loss",
    "peaks",
    "log_sums",
    "lse",
    "nll",
    "entropy",
    "predictions",
    "z_term",
]


@triton.jit(do_not_specialize=["start"], do_not_specialize_on_alignment=_PER_ROW)
def rows_kernel(
    logits,  # (R, V), rows `logits_stride` apart
    logits_stride,
    grad,  # (R, V) or None; may be the logits
    grad_stride,
    start,  # the block's first row among all N
    target,  # (N,) int64, or None for probabilities
    weight,  # (N,) a
    scale,  # (N,) r
    dead,  # (N,) bool: loss and gradient are exactly 0
    target_logits,  # (R,) or None: take the place of the targets' raw logits
    class_weight,  # (V,) or None
    class_weight_total,  # () or None
    probabilities,  # (R, V) or None
    probability_row,
    probability_class,  # strides
    loss,  # (N,) like all results; None where not asked for
    peaks,
    log_sums,
    lse,
    nll,
    entropy,
    predictions,
    z_term,
    vocabulary,
    keep,  # 1 - e
    spread,  # e / V
    z_loss,
    softcap,
    logit_scale,
    SKIPS_DEAD: tl.constexpr,  # nobody asks for statistics of dead rows
    FORWARD: tl.constexpr,  # find the norm and record results, or else load the norm
    SPLIT: tl.constexpr,  # a program for each block of a row, which is possible once the norm is known
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ALIGNED: tl.constexpr,  # the vocabulary is a multiple of what Triton reads at once
):
    """Losses, results and gradient of one row, or of one block of it: see the module's docstring."""
    LOOKS_AGAIN: tl.constexpr = (grad is not None or SMOOTHED) or (target is None or entropy is not None)
    blocks = tl.cdiv(vocabulary, BLOCK)
    program = tl.program_id(0)
    here = (program // blocks if SPLIT else program).to(tl.int64)
    row = start + here
    logits += here * logits_stride
    if grad is not None:
        grad += here * grad_stride
    begin = 0
    stop = vocabulary
    if SPLIT:
        begin = program % blocks * BLOCK
        stop = tl.minimum(begin + BLOCK, vocabulary)

    is_dead = tl.load(dead + row) != 0
    y = -1
    if target is not None:
        y = tl.load(target + row).to(tl.int32)
    z_ahead = _load(logits, begin, vocabulary, BLOCK, "evict_last")
    if is_dead & SKIPS_DEAD:
        if FORWARD:
            tl.store(loss + row, 0.0)
            if z_term is not None:
                tl.store(z_term + row, 0.0)
            if peaks is not None:
                tl.store(peaks + row, 0.0)
                tl.store(log_sums + row, 0.0)
        if grad is not None:
            for first in range(begin, stop, BLOCK):
                _store(grad, first + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32), vocabulary)
        return

    a = tl.load(weight + row)
    total_share = 1.0  # of all V classes, of which the block may have a slice
    z_y = 0.0
    x_y = 0.0
    share_y = keep
    if target is not None:
        if target_logits is None:
            # Where a row has several programs, this one's class alone needs it: another's may have been overwritten.
            z_y = tl.load(logits + y, mask=(y >= begin) & (y < stop), other=0.0).to(tl.float32)
        else:
            z_y = tl.load(target_logits + here)
        x_y, _slope_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED)
        if class_weight is not None:
            share_y = keep * tl.load(class_weight + y)
            total_share = share_y + spread * tl.load(class_weight_total)
    else:
        probabilities += here * probability_row
        if grad is not None:
            total_share = 0.0
            for first in range(0, vocabulary, BLOCK):
                columns = first + tl.arange(0, BLOCK)
                _q, share = _shares(probabilities, probability_class, class_weight, columns, vocabulary, keep, spread)
                total_share += tl.sum(share, 0)

    if FORWARD:
        peak_lanes = tl.full([LANES], -float("inf"), tl.float32)
        total_lanes = tl.zeros([LANES], tl.float32)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        at = tl.arange(0, BLOCK)
        for first in range(0, vocabulary, BLOCK):
            z = z_ahead.to(tl.float32)
            z_ahead = _load(logits, first + BLOCK, vocabulary, BLOCK, "evict_last")
            columns = first + tl.arange(0, BLOCK)
            if predictions is not None:
                key = order(z, columns < vocabulary, logit_scale)
                at = tl.where(key > best, columns, at)
                best = tl.maximum(best, key)
            x, _slope = activate(z, logit_scale, softcap, SCALED, CAPPED)
            if (first + BLOCK > vocabulary) | ((y >= first) & (y < first + BLOCK)):
                x = tl.where((columns < vocabulary) & (columns != y), x, -float("inf"))
            peak_lanes, total_lanes = add_exponentials(peak_lanes, total_lanes, in_lanes(x, LANES, ALIGNED))
        peak, total = join_lanes(peak_lanes, total_lanes)
        if target is not None:
            peak, log_sum = with_target(peak, total, x_y)
        else:
            log_sum = tl.log(total)
        if peaks is not None:
            tl.store(peaks + row, peak)
            tl.store(log_sums + row, log_sum)
        if lse is not None:
            tl.store(lse + row, peak + log_sum)
        if predictions is not None:
            _top, prediction = lowest_of_largest(best, at)
            tl.store(predictions + row, prediction.to(tl.int64))
    else:
        peak = tl.load(peaks + row)
        log_sum = tl.load(log_sums + row)

    slope_of_lse = total_share + 2 * z_loss * (peak + log_sum) if Z_LOSS else total_share
    r = tl.load(scale + row) if grad is not None else 0.0
    log_p_y = 0.0
    g_y = 0.0  # the target's, whose p - 1 would cancel where p is nearly 1
    if target is not None:
        log_p_y = (x_y - peak) - log_sum
        g_y = r * (share_y * expm1(log_p_y) + (slope_of_lse - share_y) * exp(log_p_y))
    factor = r * slope_of_lse
    spread_loss = tl.zeros([BLOCK], tl.float32)  # share times -log p
    raw_loss = tl.zeros([BLOCK], tl.float32)  # the same for the given probabilities, without smoothing and weights
    mixed = tl.zeros([BLOCK], tl.float32)  # p times -log p
    if LOOKS_AGAIN:
        looks = 1 if SPLIT else blocks
        for look in range(looks):
            first = begin + (looks - 1 - look) * BLOCK
            columns = first + tl.arange(0, BLOCK)
            z = z_ahead if SPLIT else _load(logits, first, vocabulary, BLOCK, "evict_first")
            z = z.to(tl.float32)
            if target_logits is not None:
                if (y >= first) & (y < first + BLOCK):
                    z = tl.where(columns == y, z_y, z)
            x, slope = activate(z, logit_scale, softcap, SCALED, CAPPED)
            log_p = (x - peak) - log_sum
            p = exp(log_p)
            q = 0.0
            share = 0.0
            if SMOOTHED or target is None:
                kept = keep if target is None else 0.0
                q, share = _shares(probabilities, probability_class, class_weight, columns, vocabulary, kept, spread)
            if FORWARD:
                if target is None and nll is not None:
                    raw_loss -= times(q, log_p)
                if SMOOTHED or target is None:
                    spread_loss -= times(share, log_p)
                if entropy is not None:
                    mixed -= times(tl.where(columns < vocabulary, p, 0.0), log_p)
            if grad is not None:
                g = factor * p
                if (y >= first) & (y < first + BLOCK):
                    g = tl.where(columns == y, g_y, g)
                if SMOOTHED or target is None:
                    g -= r * share
                g *= slope
                if not SKIPS_DEAD:
                    g = tl.where(is_dead, 0.0, g)
                _store(grad, columns, g, vocabulary)

    if FORWARD:
        row_loss = tl.sum(spread_loss, 0)
        row_nll = tl.sum(raw_loss, 0)
        if target is not None:
            row_loss -= times(share_y, log_p_y)
            row_nll = -log_p_y
        if nll is not None:
            tl.store(nll + row, row_nll)
        if entropy is not None:
            tl.store(entropy + row, tl.sum(mixed, 0))
        squared = z_loss * (peak + log_sum) * (peak + log_sum)
        if Z_LOSS:
            row_loss += squared
        tl.store(loss + row, tl.where(is_dead, 0.0, a * row_loss))
        if z_term is not None:
            tl.store(z_term + row, tl.where(is_dead, 0.0, a * squared))
