"""Divergence and gradient of rows with stored logits of both sides, in one launch, with one program per row.

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
from xent.backends.triton.kernels.divergence_maths import gap, is_near, pulled
from xent.backends.triton.kernels.maths import exp, finite, times
from xent.backends.triton.kernels.sides import begin, fill_row, peak, read, write
from xent.backends.triton.prepared import kernel

__all__ = ["divergence_kernel", "sums_of"]


@triton.jit
def sums_of(
    ours, theirs, m_p, m_q, offset, last,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, BEST: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """Return the sums of e = e^(x - m_p), of e^(t - m_q) and, with REVERSE, of e (d - offset).

    With BEST also the largest x and the teacher's x of that class.
    """
    s_p, s_q = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    mean, best_t = s_p, s_p
    best = s_p - float("inf")
    for step in range(0, last + 1, BLOCK):
        first = last - step if BACKWARDS else step
        _z, x = read(ours, first, BLOCK)
        _t, t = read(theirs, first, BLOCK)
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
    start: "i64",
    vocabulary: "i32",
    softcap: "fp32",
    logit_scale: "fp32",
    teacher,  # (R, V) raw logits, rows `teacher_row` apart
    teacher_row: "i64",
    teacher_values,  # (2,) float32: the teacher's softcap and logit scale; None for the numbers below
    teacher_softcap: "fp32",
    teacher_scale: "fp32",
    alpha: "fp32",  # 1 - beta
    beta: "fp32",
    way: tl.constexpr,  # see `Way`; not ragged: rows are whole multiples of 16 bytes
    TEACHER_CAPPED: tl.constexpr,
    TEACHER_SCALED: tl.constexpr,
    FORWARD: tl.constexpr,  # beta is 0
    REVERSE: tl.constexpr,  # beta is 1
    VARIATION: tl.constexpr,  # the total variation, with alpha 1
    FROM_P: tl.constexpr,  # beta is at most 0.5
    EXACT: tl.constexpr,  # the logits are float32
):
    """See the module's docstring."""
    BLOCK: tl.constexpr = way.block
    MIXED: tl.constexpr = not (FORWARD or REVERSE)
    here, row, z_row, vocabulary, logit_scale, softcap, place, facts, dead, factor = begin(
        logits, logits_inner, logits_outer, logits_row, grad, grad_inner, grad_outer, grad_row, rows, upstreams, start,
        vocabulary, softcap, logit_scale, 0, 0, way,
    )  # fmt: skip
    a = facts[1]
    ours = z_row, vocabulary, (logit_scale if way.scaled else None, softcap if way.capped else None)
    if teacher_values is not None:
        teacher_softcap, teacher_scale = tl.load(teacher_values), tl.load(teacher_values + 1)
    source = teacher + here * teacher_row
    source = source if way.ragged else tl.multiple_of(source, 16)
    bend = teacher_scale if TEACHER_SCALED else None, teacher_softcap if TEACHER_CAPPED else None
    theirs = source, vocabulary, bend
    last = (vocabulary - 1) // BLOCK * BLOCK
    if dead if results.entropy is None else a == 0:
        record(results.entropy, row, None, 0.0)
    else:
        # Sums are relative to the largest logits of the first block, unless these are far from the largest of all.
        _z, x = read(ours, 0, BLOCK)
        _t, t = read(theirs, 0, BLOCK)
        m_p, m_q, offset = finite(tl.max(x, 0)), finite(tl.max(t, 0)), 0.0
        if REVERSE:
            # The offset is the mean of d in the first block: summed terms and their rounding are small.
            e = exp(x - m_p)
            some = tl.sum(e, 0)
            offset = tl.sum(times(e, t - x), 0) / tl.where(some == 0, 1.0, some)
        z_p, z_q, mean, highest, top = sums_of(
            ours, theirs, m_p, m_q, offset, last, BLOCK, REVERSE, EXACT and MIXED, MIXED
        )
        if (is_near(z_p) & is_near(z_q)) == 0:
            m_p, m_q = peak(ours, BLOCK), peak(theirs, BLOCK)
            z_p, z_q, mean, highest, top = sums_of(
                ours, theirs, m_p, m_q, offset, last, BLOCK, REVERSE, EXACT and MIXED, MIXED
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
            z, x = read(ours, first, BLOCK)
            _t, t = read(theirs, first, BLOCK)
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
                write(place, first, ours, z, g * factor, BLOCK)
        # `pulled` is finite for NaN. This is NaN if one of the sides has a NaN or no finite logit.
        unknown = shift - shift
        record(results.loss, row, None, (tl.sum(found, 0) + unknown) * a)
        record(results.entropy, row, None, tl.sum(surprise, 0) + tl.log(z_p))
        if grad is not None and MIXED:
            pull = tl.sum(sums, 0) + unknown
            for back in range(0, last + 1, BLOCK):
                first = last - back
                z, x = read(ours, first, BLOCK)
                _t, t = read(theirs, first, BLOCK)
                apart = (t - m_q) - (x - m_p) - shift
                _cost, v = pulled(apart, apart, apart, alpha, beta, FROM_P, VARIATION)
                g = exp(x - m_p) * share_p * (pull - (v - offset))
                write(place, first, ours, z, g * factor, BLOCK)
    if dead:
        record(results.loss, row, None, 0.0)
        if grad is not None:
            fill_row(place, vocabulary, 0.0, BLOCK)
