"""Divergence and gradient of rows for a teacher that is known at K classes. One launch, one program per row.

The probability of the other classes is summed directly, because 1 minus the probability of the K classes would cancel.
So that the loops need not find the K classes, their logits are overwritten by HIDDEN after they were read. With the
teacher's q_k at the K classes, the rest t of its mass, the student's exponentials e_c of the other classes relative to
a logit m_others near the largest of them, and their sum s::

    other classes    dl/dx_c = e_c ((sum q + t) e^(m_others - m) / Z - t / s)
    the K classes    dl/dx_k = (sum q + t) p_k - q_k

The total variation is that of K + 1 cells. With the sign s of p - q of a cell, and a and b the sums of p (1 + s) and
p (1 - s) over cells, dl/dx_c = p_c ((1 + s) b - (1 - s) a) / 4.

A row whose teacher has a class outside of [0, V), a class twice, or an impossible mass, has a NaN loss and gradient.

Log-probabilities of rows with a support, the classes that a sampler allowed. One program per row.

A row's classes are ``ids[begin[i] : end[i]]``, in any order. Only their logits are read. There are three passes over
them: the largest x, the sums, and the gradient. The gradient of all other classes is 0. It may overwrite the logits, so
the first pass copies those of the row's own classes to `held`.

If the target is not in the support, the loss is infinite, and the loss and nll have no gradient. If ids are outside of
[0, V), or offsets are invalid, the row's results are NaN, and nothing is read out of bounds.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import (
    FLOOR,
    LOG2E,
    NOWHERE,
    activate,
    exp,
    finish,
    finite,
    of_mean,
    order,
    record,
    record_nothing,
    slope,
    times,
)
from xent.backends.triton.kernels.divergence_kernel import exact_exp, gap, is_near, sign
from xent.backends.triton.kernels.memory import HIDDEN, begin, fill, peak, read, write
from xent.backends.triton.launches import kernel

__all__ = [
    "support_kernel",
    "top_k_kernel",
]


@triton.jit
def _put(cells, numbers, known):
    """Store integers in the place of logits, when all threads have read them."""
    tl.debug_barrier()
    tl.store(cells, numbers.to(cells.dtype.element_ty), mask=known)
    tl.debug_barrier()


@triton.jit
def _sums(ours, m, last, way: tl.constexpr, ENTROPY: tl.constexpr):
    """Return the sums of e = e^(x - m) and, with ENTROPY, of e (m - x), over classes that are not hidden."""
    BLOCK: tl.constexpr = way.block
    sums = tl.zeros([BLOCK], tl.float32)
    below = sums
    for first in range(0, last + 1, BLOCK):
        _z, x = read(ours, first, way, True)
        e = exp(x - m)
        sums += e
        if ENTROPY:
            below += times(e, m - x)
    return tl.sum(sums, 0), tl.sum(below, 0)


@kernel
def top_k_kernel(
    logits,  # overwritten at the K classes; see `rows_kernel` for arguments that are not described here
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
    numbers,
    start: "i64",
    vocabulary: "i32",
    ids,  # (N, K) integers
    log_probs,  # (N, K), -inf for padding
    classes: "i32",  # K
    tolerance: "fp32",
    way: tl.constexpr,  # see `Way`; not ragged: rows are whole multiples of 16 bytes
    BUCKET: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    VARIATION: tl.constexpr,
    WIDTH: tl.constexpr,  # K rounded up to a power of two
):
    """See the module's docstring."""
    BLOCK: tl.constexpr = way.block
    ENTROPY: tl.constexpr = results.entropy is not None
    _here, row, ours, place, facts, dead, factor = begin(
        logits, logits_inner, logits_outer, logits_row, grad, grad_inner, grad_outer, grad_row, rows, upstreams,
        numbers, start, vocabulary, 0, 0, way,
    )  # fmt: skip
    a = facts[1]
    source, vocabulary, _bend = ours
    last = (vocabulary - 1) // BLOCK * BLOCK
    if a == 0 if ENTROPY else dead:
        record(results.entropy, row, None, 0.0)
    else:
        k = tl.arange(0, WIDTH)
        own = row * classes + k
        log_q = tl.load(log_probs + own, mask=k < classes, other=-float("inf")).to(tl.float32)
        y = tl.load(ids + own, mask=k < classes, other=0).to(tl.int64)
        given = log_q != -float("inf")
        known = given & (y >= 0) & (y < vocabulary)
        z_k = tl.load(source + y, mask=known, other=0.0).to(tl.float32)
        x_k = tl.where(known, activate(z_k, ours[2], way), -float("inf"))
        # If a class is there twice, two entries write their numbers to it, and one of them reads a wrong number.
        cells = (source + y).to(tl.pointer_type(tl.int32 if source.dtype.element_ty == tl.float32 else tl.int16))
        _put(cells, k, known)
        differs = tl.load(cells, mask=known, other=0) != k.to(cells.dtype.element_ty)
        _put(cells, k * 0 + HIDDEN, known)
        largest = finite(tl.max(log_q, 0))
        mass = tl.sum(exp(log_q - largest), 0)
        whole = mass * exp(largest)
        wrong = (tl.max((given & ((known == 0) | differs)).to(tl.int32), 0) > 0) | ((whole <= 1 + tolerance) == 0)
        if RENORMALIZED:
            wrong = wrong | (whole == 0)
            log_q -= largest + tl.log(mass)
        a, factor = tl.where(wrong, float("nan"), a), tl.where(wrong, float("nan"), factor)
        q = tl.where(known, exact_exp(log_q), 0.0)
        mass = tl.sum(q, 0)
        # The sum is relative to the largest logit of the first block, unless that is far from the largest of all.
        _z, x = read(ours, 0, way, True)
        m_others = finite(tl.max(x, 0))
        s, below = _sums(ours, m_others, last, way, ENTROPY)
        if is_near(s) == 0:
            m_others = peak(ours, way, True)
            s, below = _sums(ours, m_others, last, way, ENTROPY)
        # Without other classes any finite value works, as long as exp(m_others - m) does not overflow.
        m = tl.max(x_k, 0)
        m = finite(tl.where(s == 0, m, tl.maximum(m_others, m)))
        m_others = tl.where(s == 0, m, m_others)
        e_k = exact_exp(x_k - m)
        total = s * exp(m_others - m) + tl.sum(e_k, 0)
        log_total = tl.log(total)
        p_k = tl.div_rn(e_k, tl.zeros_like(e_k) + total)
        u = x_k - m - log_total - log_q
        left = 0.0
        if BUCKET:
            left = tl.maximum(1 - mass, 0.0)
            # If there are no other classes, a remainder within the tolerance is a rounding error.
            left = tl.where((s == 0) & (left <= tolerance), 0.0, left)
        p_left = s * exp(m_others - m) / total
        pull_k, pull_left = p_k * 0, 0.0
        if VARIATION:
            apart_k, apart_left = tl.where(known, p_k - q, 0.0), p_left - left
            sign_k, sign_left = sign(apart_k), sign(apart_left)
            above = tl.sum(p_k * (1 + sign_k), 0) + p_left * (1 + sign_left)
            below_q = tl.sum(p_k * (1 - sign_k), 0) + p_left * (1 - sign_left)
            pull_k = ((1 + sign_k) * below_q - (1 - sign_k) * above) * 0.25
            pull_left = ((1 + sign_left) * below_q - (1 - sign_left) * above) * 0.25
            found = (tl.sum(tl.abs(apart_k), 0) + tl.abs(apart_left)) * 0.5
        elif BUCKET:
            log_left = (m_others - m) + (tl.log(s) - log_total)
            found = tl.sum(tl.where(known, gap(q, p_k, u), 0.0), 0)
            found += gap(left, p_left, tl.where(left == 0, 0.0, log_left - tl.log(left))) + (mass + left - 1)
        else:
            found = -tl.sum(tl.where(known, q * u, 0.0), 0)
        record(results.loss, row, None, of_mean(found * a, row, rows))
        if ENTROPY:
            surprise = (below + s * (m - m_others)) * exp(m_others - m) + tl.sum(times(e_k, m - x_k), 0)
            record(results.entropy, row, None, surprise / total + log_total)
        if grad is not None:
            if VARIATION:
                each = pull_left * exp(m_others - m) / total
                g_k = p_k * pull_k
            else:
                each = (mass + left) * exp(m_others - m) / total - tl.where(left == 0, 0.0, left / s)
                g_k = (mass + left) * p_k - q
            for back in range(0, last + 1, BLOCK):
                z, x = read(ours, last - back, way, True)
                write(place, last - back, ours, z, exp(x - m_others) * each * factor, way)
            g_k *= factor * slope(z_k, ours[2], way)
            tl.debug_barrier()
            tl.store(place + y, g_k.to(place.dtype.element_ty), mask=known)
    if dead:
        record(results.loss, row, None, 0.0)
        if grad is not None:
            fill(place, 0.0, 0, vocabulary, way)


@triton.jit
def _entries(ids, first, size, vocabulary, BLOCK: tl.constexpr):
    """Return the numbers of a block of a row's entries, a mask of them, their classes, and which are in [0, V)."""
    entries = first + tl.arange(0, BLOCK)
    inside = entries < size
    classes = tl.load(ids + entries, mask=inside, other=0).to(tl.int64)
    return entries, inside, classes, inside & (classes >= 0) & (classes < vocabulary)


@kernel
def support_kernel(
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
    numbers,
    start: "i64",
    vocabulary: "i32",
    target_logits,
    ids,  # (M,) integers
    begins,  # (N,) integers
    ends,  # (N,) integers
    broken,  # () bool: whether the offsets are invalid; or None
    held,  # (M,) float32
    entries: "i64",  # M
    ignore_index: "i64",
    way: tl.constexpr,  # see `Way`; not ragged: rows are whole multiples of 16 bytes
    FILLED: tl.constexpr,  # the gradient is 0 already; otherwise it may be the logits
):
    """See the module's docstring."""
    BLOCK: tl.constexpr = way.block
    here, row, side, place, facts, dead, r = begin(
        logits, logits_inner, logits_outer, logits_row, grad, grad_inner, grad_outer, grad_row, rows, upstreams,
        numbers, start, vocabulary, ignore_index, vocabulary, way,
    )  # fmt: skip
    y, _a, ignored, invalid = facts
    vocabulary = side[1]
    if ignored:
        record_nothing(row, results)
        if grad is not None and not FILLED:
            fill(place, 0.0, 0, vocabulary, way)
    else:
        own, end = tl.load(begins + row).to(tl.int64), tl.load(ends + row).to(tl.int64)
        wrong = (own < 0) | (own > end) | (end > entries)
        own, end = tl.where(wrong, 0, own), tl.where(wrong, 0, end)
        size = tl.minimum(end - own, NOWHERE).to(tl.int32)
        if broken is not None:
            wrong = wrong | (tl.load(broken) != 0)
        z_y = tl.load(side[0] + y).to(tl.float32) if target_logits is None else tl.load(target_logits + here)

        # Pass 1: the largest x, and whether the target is in the support.
        peaks = tl.full([BLOCK], -float("inf"), tl.float32)
        present, strange = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        top = -float("inf")
        found = tl.zeros((), tl.int64)
        for first in range(0, size, BLOCK):
            entry, inside, classes, known = _entries(ids + own, first, size, vocabulary, BLOCK)
            z = tl.where(classes == y, z_y, tl.load(side[0] + classes, mask=known, other=0.0).to(tl.float32))
            tl.store(held + own + entry, z, mask=known)
            present |= (known & (classes == y)).to(tl.int32)
            strange |= (inside & ~known).to(tl.int32)
            peaks = tl.maximum(peaks, tl.where(known, activate(z, side[2], way), -float("inf")))
            if (results.predictions is not None) or (results.accuracy is not None):
                key = order(z, known, side[2], way)
                largest = tl.max(key, 0)
                lowest = tl.min(tl.where(known & (key == largest), classes, NOWHERE), 0)
                ties = (largest == top) & (top > -float("inf"))
                found = tl.where(largest > top, lowest, tl.where(ties, tl.minimum(found, lowest), found))
                top = tl.maximum(top, largest)
        m = finite(tl.max(peaks, 0))
        has_target = tl.max(present, 0) > 0
        wrong = wrong | (tl.max(strange, 0) > 0)
        tl.debug_barrier()

        # Pass 2: the sums. All except `v` exclude the target.
        s = tl.zeros([BLOCK], tl.float32)
        t, q, v = s, s, s
        for first in range(0, size, BLOCK):
            entry, _inside, classes, known = _entries(ids + own, first, size, vocabulary, BLOCK)
            x = activate(tl.load(held + own + entry, mask=known, other=0.0), side[2], way)
            e2 = tl.where(known & (classes != y), (x - m) * LOG2E, -float("inf"))
            e = tl.math.exp2(e2)
            s += e
            t += e * tl.maximum(e2, FLOOR)
            q += e * e
            v += tl.where(known, x, 0.0)
        nan = float("nan")
        rest = tl.where(wrong, nan, tl.sum(s, 0))  # and with it all results
        e2_y = tl.where(has_target, (activate(z_y, side[2], way) - m) * LOG2E, -float("inf"))
        level = tl.where(wrong, nan, tl.sum(v, 0) / tl.maximum(size, 1))
        factor, tilt, _delta, g_y, _gamma = finish(
            rows, row, None, facts, dead, r, 1.0, z_y, m, (rest, 0.0, 0.0, tl.sum(t, 0), tl.sum(q, 0)), e2_y, level,
            found, None, results, upstreams, (1.0, 0.0, 0.0), side[2], way, True,
        )  # fmt: skip
        if (size == 0) & (wrong == 0):  # the limits: the algebra divides by the sum
            cost = tl.where(invalid, nan, float("inf"))
            record(results.loss, row, None, tl.where(dead, 0.0, cost))
            record(results.nll, row, None, cost)
            record(results.entropy, row, None, 0.0)
            record(results.log_sum_sq_probs, row, None, -float("inf"))

        if grad is not None:
            blank = tl.where(wrong | invalid, nan, 0.0)
            if (blank != 0) | (not FILLED):
                fill(place, blank, 0, vocabulary, way)
            for first in range(0, size, BLOCK):
                entry, _inside, classes, known = _entries(ids + own, first, size, vocabulary, BLOCK)
                z = tl.load(held + own + entry, mask=known, other=0.0)
                e2 = (activate(z, side[2], way) - m) * LOG2E
                g = tl.math.exp2(e2) * (tl.fma(tl.maximum(e2, FLOOR), tilt, factor) if way.tilted else factor)
                g = tl.where(classes == y, g_y, g * slope(z, side[2], way)) + blank
                tl.store(place + classes, g.to(place.dtype.element_ty), mask=known)
