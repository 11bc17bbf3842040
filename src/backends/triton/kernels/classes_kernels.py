"""Divergence and gradient of rows for a teacher that is known at K classes. One launch, one program per row.

The probability of the other classes is summed directly, because 1 minus the probability of the K classes would cancel.
So that the loops need not find the K classes, their logits are overwritten by HIDDEN after they were read. With the
teacher's q_k at the K classes, the rest t of its mass, the student's exponentials e_c of the other classes relative to
a logit m_others near the largest of them, and their sum s::

    other classes    dl/dx_c = e_c ((sum q + t) e^(m_others - m) / Z - t / s)
    the K classes    dl/dx_k = (sum q + t) p_k - q_k

A row whose teacher has a class outside of [0, V), a class twice, or an impossible mass, has a NaN loss and gradient.

Log-probabilities of rows with a support, the classes that a sampler allowed. One program per row.

A row's classes are ``ids[begin[i] : end[i]]``, in any order. Only their logits are read. The first pass copies them to
`held`, which is then folded like a row of logits. The gradient of all other classes is 0. It may overwrite the logits.

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
    divisors_of,
    exp,
    exponent,
    finish,
    finite,
    of_mean,
    order,
    record,
    record_nothing,
    slope,
    times,
)
from xent.backends.triton.kernels.divergence_kernel import (
    HIDDEN,
    begin,
    gap,
    is_near,
    peak,
    read,
    scale_of,
    steepness,
    write,
)
from xent.backends.triton.kernels.fold import fill, first_loads, row_sums
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
    in_bucket: "i32",  # whether the tail is "bucket"
    renormalized: "i32",  # whether it is "renormalize"
    way: tl.constexpr,  # see `Way`; not ragged: rows are whole multiples of 16 bytes
    WIDTH: tl.constexpr,  # K rounded up to a power of two
):
    """See the module's docstring."""
    BLOCK: tl.constexpr = way.block
    ENTROPY: tl.constexpr = results.entropy is not None
    _local_row, row, ours, place, facts, excluded, factor = begin(
        logits, logits_inner, logits_outer, logits_row, grad, grad_inner, grad_outer, grad_row, rows, upstreams,
        numbers, start, vocabulary, 0, 0, way,
    )  # fmt: skip
    a = facts[1]
    factor *= scale_of(ours, way)
    source, vocabulary, _bend = ours
    last = (vocabulary - 1) // BLOCK * BLOCK
    if a == 0 if ENTROPY else excluded:
        record(results.entropy, row, None, 0.0)
    else:
        k = tl.arange(0, WIDTH)
        own = row * classes + k
        log_q = tl.load(log_probs + own, mask=k < classes, other=-float("inf")).to(tl.float32)
        y = tl.load(ids + own, mask=k < classes, other=0).to(tl.int64)
        present = log_q != -float("inf")
        known = present & (y >= 0) & (y < vocabulary)
        z_k = tl.load(source + y, mask=known, other=0.0).to(tl.float32)
        x_k = tl.where(known, activate(z_k, ours[2], way), -float("inf"))
        # If a class is there twice, two entries write their numbers to it, and one of them reads a wrong number.
        cells = (source + y).to(tl.pointer_type(tl.int32 if source.dtype.element_ty == tl.float32 else tl.int16))
        _put(cells, k, known)
        differs = tl.load(cells, mask=known, other=0) != k.to(cells.dtype.element_ty)
        _put(cells, k * 0 + HIDDEN, known)
        e_q = tl.exp(log_q.to(tl.float64))  # in float32, GPUs approximate 2^x to two units in the last place
        sum_q = tl.sum(e_q, 0)
        whole = sum_q.to(tl.float32)
        wrong = (tl.max((present & ((known == 0) | differs)).to(tl.int32), 0) > 0) | ((whole <= 1 + tolerance) == 0)
        if renormalized != 0:
            wrong = wrong | (whole == 0)
            e_q /= sum_q
            log_q -= tl.log(sum_q).to(tl.float32)
        a, factor = tl.where(wrong, float("nan"), a), tl.where(wrong, float("nan"), factor)
        q = tl.where(known, e_q.to(tl.float32), 0.0)
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
        e_k = tl.exp((x_k - m).to(tl.float64)).to(tl.float32)
        factor_others = exp(m_others - m)
        total = s * factor_others + tl.sum(e_k, 0)
        log_total = tl.log(total)
        p_k = tl.div_rn(e_k, tl.zeros_like(e_k) + total)
        u = x_k - m - log_total - log_q
        left = tl.maximum(1 - mass, 0.0)
        # If there are no other classes, a remainder within the tolerance is a rounding error.
        left = tl.where((in_bucket == 0) | ((s == 0) & (left <= tolerance)), 0.0, left)
        if in_bucket != 0:
            p_left = s * factor_others / total
            log_left = (m_others - m) + (tl.log(s) - log_total)
            divergence = tl.sum(tl.where(known, gap(q, p_k, u), 0.0), 0)
            divergence += gap(left, p_left, tl.where(left == 0, 0.0, log_left - tl.log(left))) + (mass + left - 1)
        else:
            divergence = -tl.sum(tl.where(known, q * u, 0.0), 0)
        record(results.loss, row, None, of_mean(divergence * a, row, divisors_of(rows)[0]))
        if ENTROPY:
            surprise = (below + s * (m - m_others)) * factor_others + tl.sum(times(e_k, m - x_k), 0)
            record(results.entropy, row, None, surprise / total + log_total)
        if grad is not None:
            each = (mass + left) * factor_others / total - tl.where(left == 0, 0.0, left / s)
            for back in range(0, last + 1, BLOCK):
                z, x = read(ours, last - back, way, True)
                write(place, last - back, ours, z, exp(x - m_others) * each * factor, way)
            g_k = ((mass + left) * p_k - q) * (factor * steepness(z_k, ours, way))
            tl.debug_barrier()
            tl.store(place + y, g_k.to(place.dtype.element_ty), mask=known)
    if excluded:
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
):
    """See the module's docstring."""
    BLOCK: tl.constexpr = way.block
    local_row, row, side, place, facts, excluded, r = begin(
        logits, logits_inner, logits_outer, logits_row, grad, grad_inner, grad_outer, grad_row, rows, upstreams,
        numbers, start, vocabulary, ignore_index, vocabulary, way,
    )  # fmt: skip
    y, _a, ignored, invalid = facts
    vocabulary = side[1]
    if ignored:
        record_nothing(row, None, results)
        if grad is not None:
            fill(place, 0.0, 0, vocabulary, way)
    else:
        own, end = tl.load(begins + row).to(tl.int64), tl.load(ends + row).to(tl.int64)
        wrong = (own < 0) | (own > end) | (end > entries)
        own, end = tl.where(wrong, 0, own), tl.where(wrong, 0, end)
        size = tl.minimum(end - own, NOWHERE).to(tl.int32)
        if broken is not None:
            wrong = wrong | (tl.load(broken) != 0)
        z_y = tl.load(side[0] + y).to(tl.float32) if target_logits is None else tl.load(target_logits + local_row)

        places = tl.full([BLOCK], -1, tl.int32)  # of the target; NOWHERE if there is an id outside of [0, V)
        for first in range(0, size, BLOCK):
            entry, inside, classes, known = _entries(ids + own, first, size, vocabulary, BLOCK)
            z = tl.where(classes == y, z_y, tl.load(side[0] + classes, mask=known, other=0.0).to(tl.float32))
            tl.store(held + own + entry, z, mask=inside)
            place_y = tl.where(known & (classes == y), entry, tl.where(inside & ~known, NOWHERE, -1))
            places = tl.maximum(places, place_y)
        place_y = tl.max(places, 0)
        wrong = wrong | (place_y == NOWHERE)
        tl.debug_barrier()
        line = held + own, 0, (size - 1) // BLOCK * BLOCK, size, size
        x_y = tl.where(place_y >= 0, activate(z_y, side[2], way), -float("inf"))
        m, sums, top, _first = row_sums(
            line, first_loads(line, place_y, way), place_y, x_y, (None, None), side[2], way
        )  # fmt: skip
        rest, _below, mixed, squares, level, _surprise, _mass, _all_q = sums
        top_class = tl.full((), NOWHERE, tl.int64)
        for first in range(0, size if way.predicted else 0, BLOCK):  # the lowest class, not the first entry
            entry, _inside, classes, known = _entries(ids + own, first, size, vocabulary, BLOCK)
            z = tl.load(held + own + entry, mask=known, other=0.0)
            largest = (order(z, side[2], way) == top) | (z != z)
            top_class = tl.minimum(top_class, tl.min(tl.where(known & largest, classes, NOWHERE), 0))
        nan = float("nan")
        rest = tl.where(wrong, nan, rest)  # and with it all results
        level = tl.where(wrong, nan, level / tl.maximum(size, 1))
        factor, log_factor, _delta, g_y, _gamma = finish(
            divisors_of(rows)[0], row, None, facts, excluded, r, 1.0, z_y, m, (rest, 0.0, 0.0, mixed, squares),
            exponent(x_y, m, True),
            level, top_class, None, results, upstreams, (1.0, 0.0, rest * 0), side[2], way, True,
        )  # fmt: skip
        if (size == 0) & (wrong == 0):  # the limits: the algebra divides by the sum
            cost = tl.where(invalid, nan, float("inf"))
            record(results.loss, row, None, tl.where(excluded, 0.0, cost))
            record(results.nll, row, None, cost)
            record(results.entropy, row, None, 0.0)
            record(results.log_sum_sq_probs, row, None, -float("inf"))

        if grad is not None:
            scale = side[2][0]  # NaN for an invalid temperature
            blank = tl.where(wrong | invalid | (scale != scale), nan, 0.0)
            fill(place, blank, 0, vocabulary, way)
            for first in range(0, size, BLOCK):
                entry, _inside, classes, known = _entries(ids + own, first, size, vocabulary, BLOCK)
                z = tl.load(held + own + entry, mask=known, other=0.0)
                e2 = (activate(z, side[2], way) - m) * LOG2E
                g = tl.math.exp2(e2) * (tl.fma(tl.maximum(e2, FLOOR), log_factor, factor) if way.of_entropy else factor)
                g = tl.where(classes == y, g_y, g * slope(z, side[2], way)) + blank
                tl.store(place + classes, g.to(place.dtype.element_ty), mask=known)
