"""Divergence and gradient of rows with stored logits of both sides, in one launch, with one program per row.

The first pass sums the exponentials of both sides, relative to the largest logit of the first block. The second pass
sums the divergence and writes the gradient. Mixtures need a third pass for the gradient, which contains KL(p || m), and
m is not known before the first pass is done. Each pass starts where the one before it ended, which is still in the
caches, and the last one goes backwards. With d = t - x::

    beta = 0    dl/dx_c = p_c - q_c
    beta = 1    dl/dx_c = p_c (sum_k p_k d_k - d_c)                          the log-normalisers cancel
    between     dl/dx_c = (1 - beta) p_c (sum_k p_k v_k - v_c)               v = log m - log p

In the last two, d and (for float32 logits) v are relative to an offset near their mean, which cancels.
"""

import triton.language as tl

from xent.backends.triton.divergence_maths import gap, mixture, pulled
from xent.backends.triton.divergence_memory import clear, read
from xent.backends.triton.launch import kernel
from xent.backends.triton.maths import exp, finite, slope

__all__ = ["FAR_ABOVE", "NEAR", "divergence_kernel"]

# A sum between these bounds is relative to a logit near the largest.
NEAR = tl.constexpr(0.5)
FAR_ABOVE = tl.constexpr(1e8)


@kernel
def divergence_kernel(
    student,  # (R, V) raw logits, rows `student_row` apart
    student_row: "i64",
    teacher,  # (R, V)
    teacher_row: "i64",
    grad,  # (R, V) or None; may be the student's logits
    grad_row: "i64",
    weight,  # (R,) float32
    scale,  # (R,) float32
    idle,  # (R,) uint8 or None
    dead,  # (R,) uint8, or None if all dead rows are idle
    loss,  # (R,) float32
    entropy,  # (R,) float32 or None
    vocabulary: "i32",
    alpha: "fp32",  # 1 - beta
    beta: "fp32",
    logit_scale: "fp32",
    softcap: "fp32",
    teacher_scale: "fp32",
    teacher_softcap: "fp32",
    FORWARD: tl.constexpr,  # beta is 0
    REVERSE: tl.constexpr,  # beta is 1
    FROM_P: tl.constexpr,  # beta is at most 0.5
    EXACT: tl.constexpr,  # the logits are float32
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    TEACHER_SCALED: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,  # rows of both sides and of the gradient are whole multiples of 16 bytes
    OVERLAID: tl.constexpr,  # a row of the gradient is the second half of the student's row
    BLOCK: tl.constexpr,
):
    """See the module's docstring.

    An OVERLAID gradient of a class is written over the logits of this class and later ones, when all threads have read
    them.
    """
    MIXED: tl.constexpr = not (FORWARD or REVERSE)
    here = tl.program_id(0).to(tl.int64)
    z_row, t_row = student + here * student_row, teacher + here * teacher_row
    place = student  # the gradient's row if there is a gradient
    if grad is not None:
        place = grad + here * grad_row
    if ALIGNED:
        z_row, t_row, place = tl.multiple_of(z_row, 16), tl.multiple_of(t_row, 16), tl.multiple_of(place, 16)
        vocabulary = vocabulary // 8 * 8  # no change, but tells the compiler that it is a multiple of 8
    is_idle = False
    if idle is not None:
        is_idle = tl.load(idle + here) != 0
    lanes = tl.arange(0, BLOCK)
    last = (vocabulary - 1) // BLOCK * BLOCK
    if is_idle:
        clear(loss + here, place, vocabulary, BLOCK, grad is not None)
        if entropy is not None:
            tl.store(entropy + here, 0.0)
    else:
        # Sums are relative to the largest logits of the first block, unless these are far from the largest of all.
        _z, x = read(z_row, 0, vocabulary, logit_scale, softcap, BLOCK, SCALED, CAPPED, False)
        _t, t = read(t_row, 0, vocabulary, teacher_scale, teacher_softcap, BLOCK, TEACHER_SCALED, TEACHER_CAPPED, False)
        m_p, m_q = finite(tl.max(x, 0)), finite(tl.max(t, 0))
        s_p, s_q = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        mean = tl.zeros([BLOCK], tl.float32)
        best, best_t = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
        offset = 0.0
        highest, top = 0.0, 0.0  # the student's largest x, and the teacher's x of that class
        if REVERSE:
            # The offset is the mean of d in the first block: summed terms and their rounding are small.
            e = exp(x - m_p)
            some = tl.sum(e, 0)
            offset = tl.sum(tl.where(e == 0, 0.0, e * (t - x)), 0) / tl.where(some == 0, 1.0, some)
        for step in range(0, last + 1, BLOCK):
            first = last - step if MIXED else step
            _z, x = read(z_row, first, vocabulary, logit_scale, softcap, BLOCK, SCALED, CAPPED, False)
            _t, t = read(
                t_row, first, vocabulary, teacher_scale, teacher_softcap, BLOCK, TEACHER_SCALED, TEACHER_CAPPED, False
            )
            e = exp(x - m_p)
            s_p += e
            s_q += exp(t - m_q)
            if REVERSE:
                mean += tl.where(e == 0, 0.0, e * (t - x - offset))
            elif EXACT and not FORWARD:
                best_t = tl.where(x > best, t, best_t)
                best = tl.maximum(best, x)
        if EXACT and MIXED:
            highest = tl.max(best, 0)
            top = tl.max(tl.where(best == highest, best_t, -float("inf")), 0)
        z_p, z_q = tl.sum(s_p, 0), tl.sum(s_q, 0)
        if ((z_p >= NEAR) & (z_p < FAR_ABOVE) & (z_q >= NEAR) & (z_q < FAR_ABOVE)) == 0:
            m_p, m_q = -float("inf"), -float("inf")
            s_p, s_q = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
            mean = tl.zeros([BLOCK], tl.float32)
            offset = 0.0
            top = 0.0
            for first in range(0, last + 1, BLOCK):
                _z, x = read(z_row, first, vocabulary, logit_scale, softcap, BLOCK, SCALED, CAPPED, False)
                _t, t = read(
                    t_row, first, vocabulary, teacher_scale, teacher_softcap, BLOCK, TEACHER_SCALED, TEACHER_CAPPED,
                    False,
                )  # fmt: skip
                # If all x so far are -inf, there is nothing to rescale. NaN propagates to the sums.
                largest_p = tl.maximum(m_p, tl.max(x, 0))
                largest_q = tl.maximum(m_q, tl.max(t, 0))
                shrink = exp(m_p - finite(largest_p))
                e = exp(x - finite(largest_p))
                s_p = s_p * shrink + e
                s_q = s_q * exp(m_q - finite(largest_q)) + exp(t - finite(largest_q))
                if REVERSE:
                    if first == 0:
                        # The offset is the mean of d in the first block: summed terms and their rounding are small.
                        some = tl.sum(e, 0)
                        offset = tl.sum(tl.where(e == 0, 0.0, e * (t - x)), 0) / tl.where(some == 0, 1.0, some)
                    mean = mean * shrink + tl.where(e == 0, 0.0, e * (t - x - offset))
                elif EXACT and not FORWARD:
                    block_top = tl.max(tl.where(x == largest_p, t, -float("inf")), 0)
                    top = tl.where(largest_p > m_p, block_top, top)
                m_p, m_q = largest_p, largest_q
            m_p, m_q = finite(m_p), finite(m_q)
            highest = m_p
            z_p, z_q = tl.sum(s_p, 0), tl.sum(s_q, 0)
        # log q - log p = (t - m_q) - (x - m_p) - shift, in which the differences of the most probable classes are
        # exact.
        shift = tl.log(z_q) - tl.log(z_p)
        share_p, share_q = tl.div_rn(1.0, z_p), tl.div_rn(1.0, z_q)
        pull = 0.0
        if REVERSE:
            pull = tl.sum(mean, 0) / z_p
        factor = tl.load(scale + here)
        if MIXED:
            factor *= alpha
            if EXACT:
                # Use v of the most probable class as the offset. If that class has nearly all probability, the mean of
                # v is close to it.
                apart = (top - m_q) - (highest - m_p) - shift
                _top_cost, _top_p, offset = mixture(apart, alpha, beta, FROM_P)
        found = tl.zeros([BLOCK], tl.float32)
        surprise = tl.zeros([BLOCK], tl.float32)
        mean = tl.zeros([BLOCK], tl.float32)
        for step in range(0, last + 1, BLOCK):
            first = step if MIXED else last - step
            z, x = read(z_row, first, vocabulary, logit_scale, softcap, BLOCK, SCALED, CAPPED, False)
            _t, t = read(
                t_row, first, vocabulary, teacher_scale, teacher_softcap, BLOCK, TEACHER_SCALED, TEACHER_CAPPED, False
            )
            x_apart, t_apart = x - m_p, t - m_q
            p, q = exp(x_apart) * share_p, exp(t_apart) * share_q
            if entropy is not None:
                surprise += tl.where(p == 0, 0.0, p * (m_p - x))
            if FORWARD:
                found += gap(q, p, x_apart - t_apart + shift)
                g = p - q
            elif REVERSE:
                found += gap(p, q, t_apart - x_apart - shift)
                g = pulled(p, t - x - offset, pull)
            else:
                cost, from_p, v = mixture(t_apart - x_apart - shift, alpha, beta, FROM_P)
                found += cost * tl.where(from_p, p, q)
                mean += p * (v - offset)
                g = p
            if grad is not None:
                if not MIXED:
                    if OVERLAID:
                        tl.debug_barrier()
                    g *= factor * slope(z, logit_scale, softcap, SCALED, CAPPED, False)
                    tl.store(place + first + lanes, g.to(place.dtype.element_ty), mask=first + lanes < vocabulary)
        # `mixture` is finite for NaN. This is NaN if one of the sides has a NaN or no finite logit.
        unknown = shift - shift
        tl.store(loss + here, (tl.sum(found, 0) + unknown) * tl.load(weight + here))
        if entropy is not None:
            tl.store(entropy + here, tl.sum(surprise, 0) + tl.log(z_p))
        if grad is not None:
            if MIXED:
                pull = tl.sum(mean, 0) + unknown
                for back in range(0, last + 1, BLOCK):
                    first = last - back
                    z, x = read(z_row, first, vocabulary, logit_scale, softcap, BLOCK, SCALED, CAPPED, False)
                    _t, t = read(
                        t_row, first, vocabulary, teacher_scale, teacher_softcap, BLOCK, TEACHER_SCALED, TEACHER_CAPPED,
                        False,
                    )  # fmt: skip
                    p = exp(x - m_p) * share_p
                    _cost, _p, v = mixture((t - m_q) - (x - m_p) - shift, alpha, beta, FROM_P)
                    g = p * (pull - (v - offset))
                    if OVERLAID:
                        tl.debug_barrier()
                    g *= factor * slope(z, logit_scale, softcap, SCALED, CAPPED, False)
                    tl.store(place + first + lanes, g.to(place.dtype.element_ty), mask=first + lanes < vocabulary)
        if dead is not None:
            if tl.load(dead + here) != 0:
                tl.debug_barrier()
                clear(loss + here, place, vocabulary, BLOCK, grad is not None)
