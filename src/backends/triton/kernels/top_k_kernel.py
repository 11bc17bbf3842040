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
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import record
from xent.backends.triton.kernels.divergence_kernel import exact_exp, gap, is_near, sign
from xent.backends.triton.kernels.maths import exp, finite, times
from xent.backends.triton.kernels.memory import HIDDEN, begin, fill_row, peak, read, slope_of, write, x_of
from xent.backends.triton.launches import kernel

__all__ = ["top_k_kernel"]


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
        x_k = tl.where(known, x_of(z_k, ours, way), -float("inf"))
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
        record(results.loss, row, None, found * a)
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
            g_k *= factor * slope_of(z_k, ours, way)
            tl.debug_barrier()
            tl.store(place + y, g_k.to(place.dtype.element_ty), mask=known)
    if dead:
        record(results.loss, row, None, 0.0)
        if grad is not None:
            fill_row(place, vocabulary, 0.0, BLOCK)
