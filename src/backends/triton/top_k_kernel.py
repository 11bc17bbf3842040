"""Divergence and gradient of rows for a teacher that is known at K classes. One launch, one program per row.

The probability of the other classes is summed directly, because 1 minus the probability of the K classes would cancel.
So that the loops need not find the K classes, their logits are hidden in the row after they were read
(`divergence_memory`). With the teacher's q_k at the K classes, the rest t of its mass, the student's exponentials e_c
of the other classes relative to a logit m_others near the largest of them, and their sum s::

    other classes    dl/dx_c = e_c ((sum q + t) e^(m_others - m) / Z - t / s)
    the K classes    dl/dx_k = (sum q + t) p_k - q_k
"""

import triton.language as tl

from xent.backends.triton.divergence_kernel import FAR_ABOVE, NEAR
from xent.backends.triton.divergence_maths import exact_exp, gap
from xent.backends.triton.divergence_memory import clear, hide, read
from xent.backends.triton.launch import kernel
from xent.backends.triton.maths import activate, exp, finite, slope

__all__ = ["top_k_kernel"]


@kernel
def top_k_kernel(
    student,  # (R, V) raw logits, rows `student_row` apart; overwritten at the K classes
    student_row: "i64",
    ids,  # (R, K) int64
    log_probs,  # (R, K) float32, -inf for padding
    grad,  # (R, V) or None; may be the student's logits
    grad_row: "i64",
    weight,  # (R,) float32
    scale,  # (R,) float32
    idle,  # (R,) uint8 or None
    dead,  # (R,) uint8, or None if all dead rows are idle
    loss,  # (R,) float32
    entropy,  # (R,) float32 or None
    vocabulary: "i32",
    classes: "i32",  # K
    tolerance: "fp32",
    logit_scale: "fp32",
    softcap: "fp32",
    BUCKET: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,  # rows of logits and gradient are whole multiples of 16 bytes
    OVERLAID: tl.constexpr,  # see `divergence_kernel`
    WIDTH: tl.constexpr,  # K rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """See the module's docstring."""
    here = tl.program_id(0).to(tl.int64)
    z_row = student + here * student_row
    place = student  # the gradient's row if there is a gradient
    if grad is not None:
        place = grad + here * grad_row
    if ALIGNED:
        z_row, place = tl.multiple_of(z_row, 16), tl.multiple_of(place, 16)
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
        k = tl.arange(0, WIDTH)
        log_q = tl.load(log_probs + here * classes + k, mask=k < classes, other=-float("inf"))
        y = tl.load(ids + here * classes + k, mask=k < classes, other=0)
        known = (log_q != -float("inf")) & (y >= 0) & (y < vocabulary)
        z_k = tl.load(z_row + y, mask=known, other=0.0).to(tl.float32)
        x_k = tl.where(known, activate(z_k, logit_scale, softcap, SCALED, CAPPED, False), -float("inf"))
        if RENORMALIZED:
            largest = finite(tl.max(log_q, 0))
            log_q -= largest + tl.log(tl.sum(exp(log_q - largest), 0))
        q = tl.where(known, exact_exp(log_q), 0.0)
        mass = tl.sum(q, 0)
        hide(z_row, y, known, WIDTH, SCALED or CAPPED)
        # The sum is relative to the largest logit of the first block, unless that is far from the largest of all.
        _z, x = read(z_row, 0, vocabulary, logit_scale, softcap, BLOCK, SCALED, CAPPED, True)
        m_others = finite(tl.max(x, 0))
        sums = tl.zeros([BLOCK], tl.float32)
        below = tl.zeros([BLOCK], tl.float32)  # of e (m_others - x)
        for first in range(0, last + 1, BLOCK):
            _z, x = read(z_row, first, vocabulary, logit_scale, softcap, BLOCK, SCALED, CAPPED, True)
            e = exp(x - m_others)
            sums += e
            if entropy is not None:
                below += tl.where(e == 0, 0.0, e * (m_others - x))
        s = tl.sum(sums, 0)
        if ((s >= NEAR) & (s < FAR_ABOVE)) == 0:
            m_others = -float("inf")
            sums = tl.zeros([BLOCK], tl.float32)
            below = tl.zeros([BLOCK], tl.float32)
            for first in range(0, last + 1, BLOCK):
                _z, x = read(z_row, first, vocabulary, logit_scale, softcap, BLOCK, SCALED, CAPPED, True)
                largest = tl.maximum(m_others, tl.max(x, 0))
                shrink, e = exp(m_others - finite(largest)), exp(x - finite(largest))
                if entropy is not None:
                    risen = tl.where(sums == 0, 0.0, sums * (largest - m_others))
                    below = (below + risen) * shrink + tl.where(e == 0, 0.0, e * (largest - x))
                sums = sums * shrink + e
                m_others = largest
            s = tl.sum(sums, 0)
        m = finite(tl.maximum(m_others, tl.max(x_k, 0)))
        # Without other classes any finite value works, as long as exp(m_others - m) does not overflow.
        m_others = tl.where(s == 0, m, finite(m_others))
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
            log_left = (m_others - m) + (tl.log(s) - log_total)
            found = tl.sum(tl.where(known, gap(q, p_k, u), 0.0), 0)
            found += gap(left, p_left, tl.where(left == 0, 0.0, log_left - tl.log(left))) + (mass + left - 1)
        else:
            found = -tl.sum(tl.where(known, q * u, 0.0), 0)
        tl.store(loss + here, found * tl.load(weight + here))
        if entropy is not None:
            surprise = (tl.sum(below, 0) + s * (m - m_others)) * exp(m_others - m)
            surprise += tl.sum(tl.where(e_k == 0, 0.0, e_k * (m - x_k)), 0)
            tl.store(entropy + here, surprise / total + log_total)
        if grad is not None:
            factor = tl.load(scale + here)
            each = (mass + left) * exp(m_others - m) / total - tl.where(left == 0, 0.0, left / s)
            for back in range(0, last + 1, BLOCK):
                first = last - back
                z, x = read(z_row, first, vocabulary, logit_scale, softcap, BLOCK, SCALED, CAPPED, True)
                if OVERLAID:
                    tl.debug_barrier()
                g = exp(x - m_others) * each * (factor * slope(z, logit_scale, softcap, SCALED, CAPPED, False))
                tl.store(place + first + lanes, g.to(place.dtype.element_ty), mask=first + lanes < vocabulary)
            g_k = ((mass + left) * p_k - q) * (factor * slope(z_k, logit_scale, softcap, SCALED, CAPPED, False))
            tl.debug_barrier()
            tl.store(place + y, g_k.to(place.dtype.element_ty), mask=known)
        if dead is not None:
            if tl.load(dead + here) != 0:
                tl.debug_barrier()
                clear(loss + here, place, vocabulary, BLOCK, grad is not None)
