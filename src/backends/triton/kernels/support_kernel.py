"""Log-probabilities of rows with a support, the classes that a sampler allowed. One program per row.

A row's classes are ``ids[begin[i] : end[i]]``, in any order. Only their logits are read. There are three passes over
them: the largest x, the sums, and the gradient. The gradient of all other classes is 0. It may overwrite the logits, so
the first pass copies those of the row's own classes to `held`.

If the target is not in the support, the loss is infinite, and the loss and nll have no gradient. If ids are outside of
[0, V), or offsets are invalid, the row's results are NaN, and nothing is read out of bounds.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import finish, record, record_nothing
from xent.backends.triton.kernels.maths import FLOOR, LOG2E, NOWHERE, finite, order
from xent.backends.triton.kernels.memory import begin, fill_row, slope_of, x_of
from xent.backends.triton.launches import kernel

__all__ = ["support_kernel"]


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
            fill_row(place, vocabulary, 0.0, BLOCK)
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
            peaks = tl.maximum(peaks, tl.where(known, x_of(z, side, way), -float("inf")))
            if (results.predictions is not None) or (results.hits is not None):
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
            x = x_of(tl.load(held + own + entry, mask=known, other=0.0), side, way)
            e2 = tl.where(known & (classes != y), (x - m) * LOG2E, -float("inf"))
            e = tl.math.exp2(e2)
            s += e
            t += e * tl.maximum(e2, FLOOR)
            q += e * e
            v += tl.where(known, x, 0.0)
        nan = float("nan")
        rest = tl.where(wrong, nan, tl.sum(s, 0))  # and with it all results
        e2_y = tl.where(has_target, (x_of(z_y, side, way) - m) * LOG2E, -float("inf"))
        level = tl.where(wrong, nan, tl.sum(v, 0) / tl.maximum(size, 1))
        factor, tilt, _delta, g_y, _gamma = finish(
            row, None, facts, dead, r, 1.0, z_y, m, (rest, 0.0, 0.0, tl.sum(t, 0), tl.sum(q, 0)), e2_y, level, found,
            None, results, upstreams, (1.0, 0.0, 0.0), side[2], way, True, True,
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
                fill_row(place, vocabulary, blank, BLOCK)
            for first in range(0, size, BLOCK):
                entry, _inside, classes, known = _entries(ids + own, first, size, vocabulary, BLOCK)
                z = tl.load(held + own + entry, mask=known, other=0.0)
                e2 = (x_of(z, side, way) - m) * LOG2E
                g = tl.math.exp2(e2) * (tl.fma(tl.maximum(e2, FLOOR), tilt, factor) if way.tilted else factor)
                g = tl.where(classes == y, g_y, g * slope_of(z, side, way)) + blank
                tl.store(place + classes, g.to(place.dtype.element_ty), mask=known)
