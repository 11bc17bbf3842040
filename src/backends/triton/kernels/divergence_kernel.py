"""Arithmetic of the divergence kernels, in terms that are not negative and do not cancel.

With u = log o - log w, a divergence sum_c w (log w - log o) is computed as the sum of w (e^u - 1 - u) = o - w - w u, as
in `xent.backends.torch.portable.divergence`. Polynomials have the smallest relative error of their degree (Lawson's
iteration in float64).

Kernels of supports and divergences read and write sides in simple blocks, with one program per row. A side is (row of
raw logits, V, (logit scale, softcap)).

Divergence and gradient of rows with stored logits of both sides, in one launch, with one program per row.

The first pass sums the exponentials of both sides, relative to the largest logit of the first block. The second pass
sums the divergence and writes the gradient. Mixtures and the total variation need a third pass for the gradient, which
contains a sum of the second one. Each pass starts where the one before it ended, which is still in the caches, and the
last one goes backwards. If the classes are on several ranks, each pass is a launch, and the sums of all ranks are
merged before the next one. With d = t - x::

    beta = 0    dl/dx_c = p_c - q_c
    beta = 1    dl/dx_c = p_c (sum_k p_k d_k - d_c)                          the log-normalisers cancel
    between     dl/dx_c = (1 - beta) p_c (sum_k p_k v_k - v_c)               v = log m - log p
    variation   dl/dx_c = p_c (sum_k p_k v_k - v_c)                          v = sign(q - p) / 2

In the last three, d and (for float32 logits) v are relative to an offset near their mean, which cancels.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import (
    activate,
    activation_of,
    divisors_of,
    exp,
    finite,
    gradient_factor,
    of_mean,
    position,
    record,
    row_at,
    row_facts,
    slope,
    times,
)
from xent.backends.triton.kernels.fold import fill
from xent.backends.triton.launches import kernel

__all__ = [
    "FOLD",
    "GRADIENT",
    "HIDDEN",
    "REFOLD",
    "WHOLE",
    "begin",
    "divergence_kernel",
    "gap",
    "is_near",
    "peak",
    "read",
    "scale_of",
    "steepness",
    "write",
]

WHOLE, FOLD, REFOLD, GRADIENT = range(4)
"""The steps of `divergence_kernel`."""

_WHOLE, _FOLD, _GRADIENT = tl.constexpr(WHOLE), tl.constexpr(FOLD), tl.constexpr(GRADIENT)
LOWEST = tl.constexpr(-3.4028234663852886e38)

# e^-128 is 0 in float32.
FARTHEST = tl.constexpr(128.0)
FAR_APART = tl.constexpr(4.0)
# The bits of sqrt(1/2), of the exponent of a float32, and ln 2 for the lowest bit of the exponent.
ROOT_HALF = tl.constexpr(0x3F3504F3)
EXPONENT = tl.constexpr(-0x800000)
LN2_PER_BIT = tl.constexpr(0.6931471805599453 / 2**23)
HIDDEN = tl.constexpr(-2)  # the bits of a hidden logit as an integer: a NaN that no computation returns


@triton.jit
def begin(
    logits, inner, outer, stride, grad, grad_inner, grad_outer, grad_stride, rows, upstreams, numbers, start,
    vocabulary, ignore_index, limit, way: tl.constexpr,
):  # fmt: skip
    """Return the program, its row, its side, the row of the gradient, `row_facts`, `excluded` and factor r.

    The row of the gradient is that of the logits if there is no gradient.
    """
    local_row = tl.program_id(0).to(tl.int64)
    row = row_at(start + local_row, None, rows)
    facts = row_facts(row, None, rows, ignore_index, limit)
    excluded, r = gradient_factor(row, None, facts[1], facts[3], divisors_of(rows)[1], upstreams)
    source = logits + position(local_row, inner, outer, stride, way.grouped)
    place = source if grad is None else grad + position(local_row, grad_inner, grad_outer, grad_stride, way.grouped)
    if not way.ragged:
        source, place = tl.multiple_of(source, 16), tl.multiple_of(place, 16)
        vocabulary = vocabulary // 8 * 8  # no change, but tells the compiler that it is a multiple of 8
    activation = activation_of(row, None, rows, numbers)
    return local_row, row, (source, vocabulary, activation), place, facts, excluded, r


@triton.jit
def read(side, first, way: tl.constexpr, HIDES: tl.constexpr = False):
    """Return a block of raw logits and its x, which is -inf beyond the end of the row and, if HIDES, where HIDDEN."""
    classes = first + tl.arange(0, way.block)
    inside = classes < side[1]
    stored = tl.load(side[0] + classes, mask=inside, other=-float("inf"))
    z = stored.to(tl.float32)
    x = activate(z, side[2], way)
    if HIDES:
        inside = inside & (stored.to(tl.int32 if stored.dtype == tl.float32 else tl.int16, bitcast=True) != HIDDEN)
    return z, tl.where(inside, x, -float("inf"))


@triton.jit
def peak(side, way: tl.constexpr, HIDES: tl.constexpr = False):
    """Return the largest x of a row, or 0 if it is -inf."""
    BLOCK: tl.constexpr = way.block
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, side[1], BLOCK):
        _z, x = read(side, first, way, HIDES)
        best = tl.maximum(best, x)
    return finite(tl.max(best, 0))


@triton.jit
def scale_of(side, way: tl.constexpr):
    """Return the part of dx/dz that is the same for all classes: 1 with a softcap."""
    return 1.0 if way.capped else side[2][0]


@triton.jit
def steepness(z, side, way: tl.constexpr):
    """Return the part of dx/dz that depends on the class: 1 without a softcap."""
    return slope(z, side[2], way) if way.capped else 1.0


@triton.jit
def write(place, first, side, z, g, way: tl.constexpr):
    """Store the gradient of a block of raw logits from dl/dx times `scale_of`.

    A gradient of another dtype may be the second half of the row of logits. Then that of a class is written over the
    logits of this class and later ones, when all threads have read them.
    """
    if place.dtype != side[0].dtype:
        tl.debug_barrier()
    classes = first + tl.arange(0, way.block)
    tl.store(place + classes, (g * steepness(z, side, way)).to(place.dtype.element_ty), mask=classes < side[1])


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
    difference = tl.where(tl.abs(u) < 0.5, w * _excess(u), tl.fma(-w, u, o - w))
    return tl.where(w == 0, o, difference)


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
def _of_class(apart, p, q, alpha, beta, KIND: tl.constexpr):
    """Return a class's term of the divergence and its v, from apart = log q - log p.

    The gradient is proportional to p_c (sum_k p_k v_k - v_c), except for KIND "forward". Of p and q, the one with the
    larger share in the mixture m is the usual reference ("from_p" or "from_q"), so that terms do not cancel for shares
    near 0 or 1. Of a mixture, and of the total variation, both results are finite for infinite `apart` and for NaN.
    """
    v = apart
    if KIND == "forward":
        cost = gap(q, p, -apart)
    elif KIND == "reverse":
        cost = gap(p, q, apart)
    elif KIND == "variation":
        v = tl.where(apart > 0, 0.5, tl.where(apart < 0, -0.5, 0.0))  # 0 for NaN
        cost = tl.where(v == 0, 0.0, tl.abs(p - q) * 0.5)
    else:
        apart = tl.maximum(tl.where(apart < FARTHEST, apart, FARTHEST), -FARTHEST)
        if KIND == "from_p":
            cost, from_q, log = _of_pair(apart, beta, alpha)
            from_p = from_q == 0
        else:
            cost, from_p, log = _of_pair(-apart, alpha, beta)
        cost *= tl.where(from_p, p, q)
        v = tl.where(from_p, log, log + apart)
    return cost, v


@triton.jit
def is_near(total):
    """Return whether a sum of exponentials is relative to a logit near the largest of all."""
    return (total >= 0.5) & (total < 1e8)


@triton.jit
def _sums(ours, theirs, m_p, m_q, last, way: tl.constexpr, their_way: tl.constexpr, KIND: tl.constexpr):
    """Return the sums of e = e^(x - m_p) and of e^(t - m_q), and what v is relative to.

    For "reverse" that is an offset, the mean of v + shift in the first block, so that summed terms and their rounding
    are small; and the sum of e (v + shift - offset). Otherwise it is the largest x, and the teacher's x of that class.
    """
    BLOCK: tl.constexpr = way.block
    _z, x = read(ours, 0, way)
    _t, t = read(theirs, 0, their_way)
    e = exp(x - m_p)
    first_sum = tl.sum(e, 0)
    offset = tl.sum(times(e, (t - m_q) - (x - m_p)), 0) / tl.where(first_sum == 0, 1.0, first_sum)
    s_p, s_q = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    mean, best_t = s_p, s_p
    best = s_p - float("inf")
    for step in range(0, last + 1, BLOCK):
        first = step if KIND == "forward" or KIND == "reverse" else last - step
        _z, x = read(ours, first, way)
        _t, t = read(theirs, first, their_way)
        e = exp(x - m_p)
        s_p += e
        s_q += exp(t - m_q)
        mean += times(e, (t - m_q) - (x - m_p) - offset)
        best_t = tl.where(x > best, t, best_t)
        best = tl.maximum(best, x)
    highest = tl.max(best, 0)
    top = tl.max(tl.where(best == highest, best_t, -float("inf")), 0)
    return tl.sum(s_p, 0), tl.sum(s_q, 0), tl.sum(mean, 0), offset, highest, top


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
    vocabulary: "i32",  # classes of this rank
    teacher,  # (R, V) raw logits, rows `teacher_row` apart
    teacher_row: "i64",
    teacher_rows,  # and its numbers
    teacher_numbers,
    alpha: "fp32",  # 1 - beta
    beta: "fp32",
    sums,  # (5, R) of FOLD, (2, R) of REFOLD
    sums_row: "i64",
    merged,  # (6, R) of all ranks: peak and rest of the student, of the teacher, its x of the top class, the pull
    merged_row: "i64",
    way: tl.constexpr,  # see `Way`; not ragged: rows are whole multiples of 16 bytes
    their_way: tl.constexpr,  # of the teacher's logits
    KIND: tl.constexpr,  # "forward" (beta is 0), "reverse" (1), "variation" (alpha is 1), or see `_of_class`
    STEP: tl.constexpr,  # WHOLE, or of classes on several ranks FOLD, REFOLD or GRADIENT
):
    """See the module's docstring."""
    BLOCK: tl.constexpr = way.block
    WHOLE: tl.constexpr = STEP == _WHOLE
    FORWARD: tl.constexpr = KIND == "forward"
    REVERSE: tl.constexpr = KIND == "reverse"
    MIXED: tl.constexpr = not (FORWARD or REVERSE)
    local_row, row, ours, place, facts, excluded, factor = begin(
        logits, logits_inner, logits_outer, logits_row, grad, grad_inner, grad_outer, grad_row, rows, upstreams,
        numbers, start, vocabulary, 0, 0, way,
    )  # fmt: skip
    a, vocabulary = facts[1], ours[1]
    factor *= scale_of(ours, way)
    source = teacher + local_row * teacher_row
    source = source if way.ragged else tl.multiple_of(source, 16)
    theirs = source, vocabulary, activation_of(local_row, None, teacher_rows, teacher_numbers)
    last = (vocabulary - 1) // BLOCK * BLOCK
    skippable = (excluded if results.entropy is None else a == 0) & (WHOLE or STEP == _GRADIENT)
    if skippable:
        record(results.entropy, row, None, 0.0)
    else:
        if WHOLE or STEP == _FOLD:
            # Sums are relative to the largest logits of the first block, unless these are far from the largest of all.
            _z, x = read(ours, 0, way)
            _t, t = read(theirs, 0, their_way)
            m_p, m_q = finite(tl.max(x, 0)), finite(tl.max(t, 0))
            z_p, z_q, mean, offset, highest, top = _sums(ours, theirs, m_p, m_q, last, way, their_way, KIND)
            if (is_near(z_p) & is_near(z_q)) == 0:
                m_p, m_q = peak(ours, way), peak(theirs, their_way)
                z_p, z_q, mean, offset, highest, top = _sums(ours, theirs, m_p, m_q, last, way, their_way, KIND)
            pull = mean / z_p
        else:
            known = merged + local_row
            m_p, z_p = tl.load(known), tl.load(known + merged_row)
            m_q, highest = tl.load(known + 2 * merged_row), m_p
            z_q, top = tl.load(known + 3 * merged_row), tl.load(known + 4 * merged_row)
            pull = tl.load(known + 5 * merged_row) if STEP == _GRADIENT else z_p
        if STEP == _FOLD:
            m = tl.where(highest == -float("inf"), LOWEST, highest)
            folded = m, times(z_p, exp(m_p - m)), m_q, z_q, top
            for k in tl.static_range(5):
                tl.store(sums + k * sums_row + local_row, folded[k])
        else:
            # log q - log p = (t - m_q) - (x - m_p) - shift, in which the differences of the most probable classes are
            # exact.
            shift = tl.log(z_q) - tl.log(z_p)
            share_p, share_q = tl.div_rn(1.0, z_p), tl.div_rn(1.0, z_q)
            unknown = shift - shift  # NaN if one of the sides has a NaN or no finite logit, as `_of_class` may not be
            factor += unknown
            if REVERSE and WHOLE:
                offset -= shift
            elif logits.dtype.element_ty == tl.float32 or not WHOLE:
                # Use v of the most probable class as the offset. If that class has nearly all probability, the mean of
                # v is close to it.
                of_top = (top - m_q) - (highest - m_p) - shift
                _cost, offset = _of_class(of_top, of_top, of_top, alpha, beta, KIND)
            else:
                offset = 0.0
            if MIXED:
                factor *= alpha
            costs = tl.zeros([BLOCK], tl.float32)
            surprise, pulls = costs, costs
            for turn in tl.static_range(2 if (MIXED and WHOLE) and grad is not None else 1):
                for step in range(0, last + 1, BLOCK):
                    first = step if MIXED and turn == 0 else last - step
                    z, x = read(ours, first, way)
                    _t, t = read(theirs, first, their_way)
                    x_apart, t_apart = x - m_p, t - m_q
                    p, q = exp(x_apart) * share_p, exp(t_apart) * share_q
                    cost, v = _of_class(t_apart - x_apart - shift, p, q, alpha, beta, KIND)
                    v -= offset
                    if turn == 0 and STEP != _GRADIENT:
                        costs += cost
                        if results.entropy is not None:
                            surprise += times(p, m_p - x)
                        if not FORWARD:
                            pulls += times(p, v) if REVERSE else p * v
                    if grad is not None and (turn == 1 or not (MIXED and WHOLE)):
                        g = p * (pull - v)
                        if not MIXED:
                            g = p - q if FORWARD else times(p, pull - v)
                        write(place, first, ours, z, g * factor, way)
                if turn == 0 and STEP != _GRADIENT:
                    loss, total = tl.sum(costs, 0) + unknown, tl.sum(pulls, 0) + unknown
                    if WHOLE:
                        pull = total
                        record(results.loss, row, None, of_mean(loss * a, row, divisors_of(rows)[0]))
                        record(results.entropy, row, None, tl.sum(surprise, 0) + tl.log(z_p))
                    else:
                        tl.store(sums + local_row, loss)
                        tl.store(sums + sums_row + local_row, total)
    if excluded:
        record(results.loss, row, None, 0.0)
        if grad is not None:
            fill(place, 0.0, 0, vocabulary, way)
