"""Arithmetic of the divergence kernels, in terms that are not negative and do not cancel.

With u = log o - log w, a divergence sum_c w (log w - log o) is computed as the sum of w (e^u - 1 - u) = o - w - w u, as
in `xent.backends.torch.portable.divergence`. Polynomials have the smallest relative error of their degree (Lawson's
iteration in float64).

Divergence and gradient of rows with stored logits of both sides, in one launch, with one program per row.

The first pass sums the exponentials of both sides, relative to the largest logit of the first block. The second pass
sums the divergence and writes the gradient. Mixtures and the total variation need a third pass for the gradient, which
contains a sum of the second one. Each pass starts where the one before it ended, which is still in the caches, and the
last one goes backwards. With d = t - x::

    beta = 0    dl/dx_c = p_c - q_c
    beta = 1    dl/dx_c = p_c (sum_k p_k d_k - d_c)                          the log-normalisers cancel
    between     dl/dx_c = (1 - beta) p_c (sum_k p_k v_k - v_c)               v = log m - log p
    variation   dl/dx_c = p_c (sum_k p_k v_k - v_c)                          v = sign(q - p) / 2

In the last three, d and (for float32 logits) v are relative to an offset near their mean, which cancels.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import record
from xent.backends.triton.kernels.maths import LOG2E, exp, finite, times
from xent.backends.triton.kernels.memory import begin, fill_row, peak, read, write
from xent.backends.triton.launches import kernel

__all__ = ["divergence_kernel", "exact_exp", "gap", "is_near", "pulled", "sign", "sums_of"]

# ln 2 in two parts: the first has so few bits that its products with small integers are exact.
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.12194440e-4)
# e^-128 is 0 in float32.
FARTHEST = tl.constexpr(128.0)
FAR_APART = tl.constexpr(4.0)
# The bits of sqrt(1/2), of the exponent of a float32, and ln 2 for the lowest bit of the exponent.
ROOT_HALF = tl.constexpr(0x3F3504F3)
EXPONENT = tl.constexpr(-0x800000)
LN2_PER_BIT = tl.constexpr(0.6931471805599453 / 2**23)


@triton.jit
def exact_exp(x):
    """Return e^x for x < 88 with an error of one or two roundings for any x; 0 below e^-87.

    GPUs approximate 2^x to two units in the last place. The polynomial is for [-ln(2) / 2, ln(2) / 2].
    """
    near = tl.maximum(x, -87.0, propagate_nan=tl.PropagateNan.ALL)
    whole = tl.floor(near * LOG2E + 0.5)
    rest = tl.fma(whole, -LN2_LOW, tl.fma(whole, -LN2_HIGH, near))
    series = 0.0013811662355812532
    series = tl.fma(rest, series, 0.008370134913053884)
    series = tl.fma(rest, series, 0.041668528282492644)
    series = tl.fma(rest, series, 0.16666508716099204)
    series = tl.fma(rest, series, 0.49999992629512235)
    power = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87, 0.0, power * (1 + tl.fma(rest * rest, series, rest)))


@triton.jit
def _excess(u):
    """Return e^u - 1 - u for -0.5 <= u <= 0.5 with the relative error of a rounding."""
    series = tl.fma(u, 0.0001987562891356906, 0.0013981997363968189)
    series = tl.fma(u, series, 0.008333452173482764)
    series = tl.fma(u, series, 0.04166579594172313)
    series = tl.fma(u, series, 0.16666665455830654)
    series = tl.fma(u, series, 0.5000000120139751)
    return u * u * series


@triton.jit
def gap(w, o, u):
    """Return w (e^u - 1 - u) for o = w e^u, and o if w is 0. If u is not small, it is o - w - w u."""
    found = tl.where(tl.abs(u) < 0.5, w * _excess(u), tl.fma(-w, u, o - w))
    return tl.where(w == 0, o, found)


@triton.jit
def _of_pair(a, small, large):
    """Return c, whether it is relative to o, and L, for two distributions w and o, a = log o - log w and their shares.

    m = large w + small o is their mixture. Relative to w, ::

        (small KL(o || m) + large KL(w || m)) per class = w c        M = m / w = 1 + s (e^u - 1)        L = log M
        c = s u e^u - M L        s = small        u = a

    If a > 4, c is relative to o and the roles are exchanged. For small u, terms of first order, which
    cancel, are left out: c = -(s (E - u) + (L - y) + y (L - u)) with E = e^u - 1 and y = s E.

    L is 2 atanh(z) with z = y / (2 + y), after factors of two are taken out of M. Without these, L - y is
    2 atanh(z) - 2 z - y z.
    """
    size = tl.abs(a)
    is_near, is_far, from_o = size < 0.5, size > FAR_APART, a > FAR_APART
    share = tl.where(from_o, large, small)
    u = tl.where(is_far, -size, a)
    excess, power_of_e = _excess(u), exp(u)
    y = share * tl.where(is_near, excess + u, power_of_e - 1)
    mixed = tl.where(is_far, tl.fma(share, power_of_e, tl.where(from_o, small, large)), 1 + y)
    bits = mixed.to(tl.int32, bitcast=True)
    power = (bits - ROOT_HALF) & EXPONENT
    rest = tl.where(power == 0, y, (bits - power).to(tl.float32, bitcast=True) - 1)
    z = rest / (2 + rest)
    t = z * z
    series = tl.fma(t, 0.14800638444364417, 0.19994150725256638)
    series = tl.fma(t, series, 0.33333343122002246)
    third = 2 * z * t * series
    log = tl.fma(power.to(tl.float32), LN2_PER_BIT, tl.fma(z, 2.0, third))
    near = tl.fma(share, excess, tl.fma(y, log - u, tl.fma(-y, z, third)))
    far = tl.fma(-share * power_of_e, u, mixed * log)
    return tl.maximum(-tl.where(is_near, near, far), 0.0), from_o, log


@triton.jit
def _mixture(apart, alpha, beta, FROM_P: tl.constexpr):
    """Return c, whether it is relative to p, and v = log m - log p, for m = alpha p + beta q and alpha = 1 - beta.

    `apart` is log q - log p. The sum of c p or c q is beta KL(q || m) + alpha KL(p || m). FROM_P: beta <= 0.5. Of p
    and q, the one with the larger share is the usual reference, so that terms do not cancel for shares near 0 or 1.
    c and v are finite for infinite `apart` and for NaN.
    """
    apart = tl.maximum(tl.where(apart < FARTHEST, apart, FARTHEST), -FARTHEST)
    if FROM_P:
        cost, from_q, log = _of_pair(apart, beta, alpha)
        from_p = from_q == 0
    else:
        cost, from_p, log = _of_pair(-apart, alpha, beta)
    return cost, from_p, tl.where(from_p, log, log + apart)


@triton.jit
def sign(x):
    """Return 1, -1, or 0 for 0 and NaN."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def pulled(apart, p, q, alpha, beta, FROM_P: tl.constexpr, VARIATION: tl.constexpr):
    """Return a class's term of the divergence and its v, for a gradient proportional to p_c (sum_k p_k v_k - v_c).

    v is log m - log p of a mixture m. VARIATION: of the total variation, it is sign(q - p) / 2.
    """
    if VARIATION:
        v = sign(apart) * 0.5
        cost = tl.where(v == 0, 0.0, tl.abs(p - q) * 0.5)
    else:
        cost, from_p, v = _mixture(apart, alpha, beta, FROM_P)
        cost *= tl.where(from_p, p, q)
    return cost, v


@triton.jit
def is_near(total):
    """Return whether a sum of exponentials is relative to a logit near the largest of all."""
    return (total >= 0.5) & (total < 1e8)


@triton.jit
def sums_of(
    ours, theirs, m_p, m_q, offset, last,
    way: tl.constexpr, their_way: tl.constexpr,
    REVERSE: tl.constexpr, BEST: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """Return the sums of e = e^(x - m_p), of e^(t - m_q) and, with REVERSE, of e (d - offset).

    With BEST also the largest x and the teacher's x of that class.
    """
    BLOCK: tl.constexpr = way.block
    s_p, s_q = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    mean, best_t = s_p, s_p
    best = s_p - float("inf")
    for step in range(0, last + 1, BLOCK):
        first = last - step if BACKWARDS else step
        _z, x = read(ours, first, way)
        _t, t = read(theirs, first, their_way)
        e = exp(x - m_p)
        s_p += e
        s_q += exp(t - m_q)
        if REVERSE:
            mean += times(e, t - x - offset)
        if BEST:
            best_t = tl.where(x > best, t, best_t)
            best = tl.maximum(best, x)
    highest = tl.max(best, 0)
    top = tl.max(tl.where(best == highest, best_t, -float("inf")), 0)
    return tl.sum(s_p, 0), tl.sum(s_q, 0), tl.sum(mean, 0), highest, top


@kernel
def divergence_kernel(
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
    teacher,  # (R, V) raw logits, rows `teacher_row` apart
    teacher_row: "i64",
    teacher_values,  # (2,) float32: the teacher's softcap and logit scale; None for the numbers below
    teacher_softcap: "fp32",
    teacher_scale: "fp32",
    alpha: "fp32",  # 1 - beta
    beta: "fp32",
    way: tl.constexpr,  # see `Way`; not ragged: rows are whole multiples of 16 bytes
    their_way: tl.constexpr,  # of the teacher's logits
    FORWARD: tl.constexpr,  # beta is 0
    REVERSE: tl.constexpr,  # beta is 1
    VARIATION: tl.constexpr,  # the total variation, with alpha 1
    FROM_P: tl.constexpr,  # beta is at most 0.5
    EXACT: tl.constexpr,  # the logits are float32
):
    """See the module's docstring."""
    BLOCK: tl.constexpr = way.block
    MIXED: tl.constexpr = not (FORWARD or REVERSE)
    here, row, ours, place, facts, dead, factor = begin(
        logits, logits_inner, logits_outer, logits_row, grad, grad_inner, grad_outer, grad_row, rows, upstreams,
        numbers, start, vocabulary, 0, 0, way,
    )  # fmt: skip
    a, vocabulary = facts[1], ours[1]
    if teacher_values is not None:
        teacher_softcap, teacher_scale = tl.load(teacher_values), tl.load(teacher_values + 1)
    source = teacher + here * teacher_row
    source = source if way.ragged else tl.multiple_of(source, 16)
    theirs = source, vocabulary, (teacher_scale, teacher_softcap)
    last = (vocabulary - 1) // BLOCK * BLOCK
    if dead if results.entropy is None else a == 0:
        record(results.entropy, row, None, 0.0)
    else:
        # Sums are relative to the largest logits of the first block, unless these are far from the largest of all.
        _z, x = read(ours, 0, way)
        _t, t = read(theirs, 0, their_way)
        m_p, m_q, offset = finite(tl.max(x, 0)), finite(tl.max(t, 0)), 0.0
        if REVERSE:
            # The offset is the mean of d in the first block: summed terms and their rounding are small.
            e = exp(x - m_p)
            some = tl.sum(e, 0)
            offset = tl.sum(times(e, t - x), 0) / tl.where(some == 0, 1.0, some)
        z_p, z_q, mean, highest, top = sums_of(
            ours, theirs, m_p, m_q, offset, last, way, their_way, REVERSE, EXACT and MIXED, MIXED
        )
        if (is_near(z_p) & is_near(z_q)) == 0:
            m_p, m_q = peak(ours, way), peak(theirs, their_way)
            z_p, z_q, mean, highest, top = sums_of(
                ours, theirs, m_p, m_q, offset, last, way, their_way, REVERSE, EXACT and MIXED, MIXED
            )
        # log q - log p = (t - m_q) - (x - m_p) - shift, in which the differences of the most probable classes are
        # exact.
        shift = tl.log(z_q) - tl.log(z_p)
        share_p, share_q = tl.div_rn(1.0, z_p), tl.div_rn(1.0, z_q)
        pull = mean / z_p
        if MIXED:
            factor *= alpha
            if EXACT:
                # Use v of the most probable class as the offset. If that class has nearly all probability, the mean of
                # v is close to it.
                of_top = (top - m_q) - (highest - m_p) - shift
                _top_cost, offset = pulled(of_top, of_top, of_top, alpha, beta, FROM_P, VARIATION)
        found = tl.zeros([BLOCK], tl.float32)
        surprise, sums = found, found
        for step in range(0, last + 1, BLOCK):
            first = step if MIXED else last - step
            z, x = read(ours, first, way)
            _t, t = read(theirs, first, their_way)
            x_apart, t_apart = x - m_p, t - m_q
            p, q = exp(x_apart) * share_p, exp(t_apart) * share_q
            if results.entropy is not None:
                surprise += times(p, m_p - x)
            if FORWARD:
                found += gap(q, p, x_apart - t_apart + shift)
                g = p - q
            elif REVERSE:
                found += gap(p, q, t_apart - x_apart - shift)
                g = times(p, pull - (t - x - offset))
            else:
                cost, v = pulled(t_apart - x_apart - shift, p, q, alpha, beta, FROM_P, VARIATION)
                found += cost
                sums += p * (v - offset)
                g = p
            if grad is not None and not MIXED:
                write(place, first, ours, z, g * factor, way)
        # `pulled` is finite for NaN. This is NaN if one of the sides has a NaN or no finite logit.
        unknown = shift - shift
        record(results.loss, row, None, (tl.sum(found, 0) + unknown) * a)
        record(results.entropy, row, None, tl.sum(surprise, 0) + tl.log(z_p))
        if grad is not None and MIXED:
            pull = tl.sum(sums, 0) + unknown
            for back in range(0, last + 1, BLOCK):
                first = last - back
                z, x = read(ours, first, way)
                _t, t = read(theirs, first, their_way)
                apart = (t - m_q) - (x - m_p) - shift
                _cost, v = pulled(apart, apart, apart, alpha, beta, FROM_P, VARIATION)
                g = exp(x - m_p) * share_p * (pull - (v - offset))
                write(place, first, ours, z, g * factor, way)
    if dead:
        record(results.loss, row, None, 0.0)
        if grad is not None:
            fill_row(place, vocabulary, 0.0, BLOCK)
