"""The divergence of rows whose classes are on several ranks: both folds and the gradient, with one program per row.

`divergence_kernel` has the formulas. Here v of the most probable class of all ranks is the offset.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.divergence_kernel import gap, is_near, pulled, sums_of
from xent.backends.triton.kernels.maths import exp, finite, times
from xent.backends.triton.kernels.memory import begin, fill_row, peak, read, write
from xent.backends.triton.launches import kernel

__all__ = ["FOLD", "GRADIENT", "REFOLD", "divergence_shard_kernel"]

FOLD, REFOLD, GRADIENT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _of_class(
    apart, p, q, alpha, beta,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, VARIATION: tl.constexpr, FROM_P: tl.constexpr,
):  # fmt: skip
    """Return a class's term of the divergence, and its v."""
    v = apart
    if FORWARD:
        cost = gap(q, p, -apart)
    elif REVERSE:
        cost = gap(p, q, apart)
    else:
        cost, v = pulled(apart, p, q, alpha, beta, FROM_P, VARIATION)
    return cost, v


@kernel
def divergence_shard_kernel(
    logits,  # see `divergence_kernel` for arguments that are not described here
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
    teacher,
    teacher_row: "i64",
    teacher_values,
    teacher_softcap: "fp32",
    teacher_scale: "fp32",
    alpha: "fp32",
    beta: "fp32",
    sums,  # (5, R) of FOLD, with ENTROPY (6, R); (2, R) of REFOLD
    sums_row: "i64",
    merged,  # (6, R) of all ranks: peak and rest of the student, of the teacher, its x of the top class, the pull
    merged_row: "i64",
    way: tl.constexpr,
    their_way: tl.constexpr,
    FORWARD: tl.constexpr,
    REVERSE: tl.constexpr,
    VARIATION: tl.constexpr,
    FROM_P: tl.constexpr,
    STEP: tl.constexpr,  # FOLD, REFOLD or GRADIENT
    ENTROPY: tl.constexpr,  # whether FOLD sums e (x - peak) for the student's entropy
):
    """See the module's docstring."""
    BLOCK: tl.constexpr = way.block
    here, _row, ours, place, _facts, dead, factor = begin(
        logits, logits_inner, logits_outer, logits_row, grad, grad_inner, grad_outer, grad_row, rows, upstreams,
        numbers, start, vocabulary, 0, 0, way,
    )  # fmt: skip
    vocabulary = ours[1]
    if teacher_values is not None:
        teacher_softcap, teacher_scale = tl.load(teacher_values), tl.load(teacher_values + 1)
    source = teacher + here * teacher_row
    source = source if way.ragged else tl.multiple_of(source, 16)
    theirs = source, vocabulary, (teacher_scale, teacher_softcap)
    last = (vocabulary - 1) // BLOCK * BLOCK
    if STEP == FOLD:
        _z, x = read(ours, 0, way)
        _t, t = read(theirs, 0, their_way)
        m_p, m_q = finite(tl.max(x, 0)), finite(tl.max(t, 0))
        z_p, z_q, _mean, highest, top = sums_of(ours, theirs, m_p, m_q, 0.0, last, way, their_way, False, True, True)
        if (is_near(z_p) & is_near(z_q)) == 0:
            m_p, m_q = peak(ours, way), peak(theirs, their_way)
            z_p, z_q, _mean, highest, top = sums_of(
                ours, theirs, m_p, m_q, 0.0, last, way, their_way, False, True, True
            )
        m = tl.where(highest == -float("inf"), LOWEST, highest)
        tl.store(sums + here, m)
        tl.store(sums + sums_row + here, times(z_p, exp(m_p - m)))
        if ENTROPY:
            mixed = tl.zeros([BLOCK], tl.float32)
            for first in range(0, last + 1, BLOCK):
                _z, x = read(ours, first, way)
                mixed += times(exp(x - m), x - m)
            tl.store(sums + 2 * sums_row + here, tl.sum(mixed, 0))
            sums += sums_row
        tl.store(sums + 2 * sums_row + here, m_q)
        tl.store(sums + 3 * sums_row + here, z_q)
        tl.store(sums + 4 * sums_row + here, top)
    else:
        m_p, z_p = tl.load(merged + here), tl.load(merged + merged_row + here)
        m_q, z_q = tl.load(merged + 2 * merged_row + here), tl.load(merged + 3 * merged_row + here)
        shift = tl.log(z_q) - tl.log(z_p)
        of_top = tl.load(merged + 4 * merged_row + here) - m_q - shift
        _cost, offset = _of_class(of_top, of_top, of_top, alpha, beta, FORWARD, REVERSE, VARIATION, FROM_P)
        share_p, share_q = tl.div_rn(1.0, z_p), tl.div_rn(1.0, z_q)
        unknown = shift - shift
        if STEP == REFOLD:
            found = tl.zeros([BLOCK], tl.float32)
            pull = found
            for first in range(0, last + 1, BLOCK):
                _z, x = read(ours, first, way)
                _t, t = read(theirs, first, their_way)
                p, q = exp(x - m_p) * share_p, exp(t - m_q) * share_q
                apart = (t - m_q) - (x - m_p) - shift
                cost, v = _of_class(apart, p, q, alpha, beta, FORWARD, REVERSE, VARIATION, FROM_P)
                found += cost
                if not FORWARD:
                    pull += times(p, v - offset)
            tl.store(sums + here, tl.sum(found, 0) + unknown)
            tl.store(sums + sums_row + here, tl.sum(pull, 0) + unknown)
        elif dead:
            fill_row(place, vocabulary, 0.0, BLOCK)
        else:
            pull = tl.load(merged + 5 * merged_row + here)
            if not ((FORWARD or REVERSE) or VARIATION):
                factor *= alpha
            for back in range(0, last + 1, BLOCK):
                first = last - back
                z, x = read(ours, first, way)
                _t, t = read(theirs, first, their_way)
                p = exp(x - m_p) * share_p
                if FORWARD:
                    g = p - exp(t - m_q) * share_q + unknown
                else:
                    apart = (t - m_q) - (x - m_p) - shift
                    _c, v = _of_class(apart, apart, apart, alpha, beta, FORWARD, REVERSE, VARIATION, FROM_P)
                    g = times(p, pull - (v - offset))
                write(place, first, ours, z, g * factor, way)
