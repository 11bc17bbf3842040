"""Log-probabilities of rows with a support, the classes that a sampler allowed. One program per row.

A row's classes are ``ids[offsets[i] : offsets[i + 1]]``, in any order. Only their logits are read. There are three
passes over them: the largest x, the sums, and the gradient. The gradient of all other classes is 0. It may overwrite
the logits, so the gradients of the row's own classes are held in `held` until the zeros are written.

If the target is not in the support, the loss is infinite, and the loss and nll have no gradient. If ids are outside of
[0, V), or offsets do not rise from 0 to the number of ids, the row's results are NaN, and nothing is read out of
bounds.
"""

import triton
import triton.language as tl

from xent.backends.triton.launch import kernel
from xent.backends.triton.maths import FLOOR, LOG2E, NOWHERE, activate, exp, finite, order, slope, times
from xent.backends.triton.row_algebra import (
    bend_of_row,
    entropy_of,
    log_of_squares,
    losses,
    position,
    row_facts,
    with_statistics,
)
from xent.backends.triton.row_gradient import target_gradient
from xent.backends.triton.row_memory import fill
from xent.backends.triton.row_results import record, store_nothing

__all__ = ["support_kernel"]


@triton.jit
def _row_of_ids(offsets, row, count, entries, shift, SHIFTED: tl.constexpr):
    """Return the position of a row's first id, the number of its ids, and whether the offsets read here are ordered."""
    source = row + shift if SHIFTED else row
    first = tl.load(offsets + source, mask=source < count, other=0).to(tl.int64)
    end = tl.load(offsets + source + 1, mask=source < count, other=0).to(tl.int64)
    rises = (first >= 0) & (first <= end) & (end <= entries)
    whole = (tl.load(offsets).to(tl.int64) == 0) & (tl.load(offsets + count).to(tl.int64) == entries)
    first = tl.where(rises, first, 0)
    return first, tl.where(rises, tl.minimum(end - first, NOWHERE), 0).to(tl.int32), rises & whole


@triton.jit
def _classes_of(ids, first, size, vocabulary, BLOCK: tl.constexpr):
    """Return a block of a row's classes, a mask of its entries, and a mask of the entries in [0, V)."""
    inside = first + tl.arange(0, BLOCK) < size
    classes = tl.load(ids + first + tl.arange(0, BLOCK), mask=inside, other=0).to(tl.int64)
    return classes, inside, inside & (classes >= 0) & (classes < vocabulary)


@triton.jit
def _logits_of(source, classes, known, y, z_y):
    """Return the raw logits of a block of classes. That of the target is `z_y`."""
    return tl.where(classes == y, z_y, tl.load(source + classes, mask=known, other=0.0).to(tl.float32))


@kernel
def support_kernel(
    logits,  # see `rows_kernel` for arguments that are not described here
    logits_inner: "i64",
    logits_outer: "i64",
    logits_row: "i64",
    skew: "i64",
    grad,
    grad_inner: "i64",
    grad_outer: "i64",
    grad_row: "i64",
    order_of_rows,
    start: "i64",
    ids,  # (M,) integers
    offsets,  # (N + 1,) integers, by position of the target
    entries: "i64",  # M
    held,  # (M,) float32, with `grad`
    target,
    target_logits,
    upstream,
    upstream_stride: "i64",
    lse_upstream,
    lse_upstream_stride: "i64",
    nll_upstream,
    nll_upstream_stride: "i64",
    entropy_upstream,
    entropy_upstream_stride: "i64",
    loss,
    lse,
    nll,
    entropy,
    predictions,
    hits,
    z_term,  # 0: log-probabilities have no z-loss
    log_sum_sq,
    mean_logit,
    count: "i64",
    length: "i64",
    shift: "i64",
    ignore_index: "i64",
    vocabulary: "i32",
    softcap: "fp32",
    logit_scale: "fp32",
    bend,
    bend_stride: "i64",
    SHIFTED: tl.constexpr,
    GROUPED: tl.constexpr,
    SKEWED: tl.constexpr,
    RAGGED: tl.constexpr,
    VECTOR: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See the module's docstring."""
    TILTED: tl.constexpr = entropy_upstream is not None
    STATISTICS: tl.constexpr = TILTED or ((lse_upstream is not None) or (nll_upstream is not None))
    PREDICTED: tl.constexpr = (predictions is not None) or (hits is not None)
    here = tl.program_id(0).to(tl.int64)
    row = start + here
    if order_of_rows is not None:
        row = tl.load(order_of_rows + row)
    y, _a, _w, ignored, invalid = row_facts(
        row, row < count, target, None, None, length, shift, ignore_index, vocabulary, SHIFTED, False
    )
    softcap, logit_scale = bend_of_row(row, bend, bend_stride, softcap, logit_scale, count, shift, SHIFTED)
    begin = position(here, logits_inner, logits_outer, logits_row, GROUPED)
    source = logits + begin
    if grad is not None:
        off = 0
        if SKEWED:
            off = ((skew + begin) % VECTOR).to(tl.int32)
        last = (vocabulary + off - 1) // BLOCK * BLOCK
        place = grad + (position(here, grad_inner, grad_outer, grad_row, GROUPED) - off)
        if VECTOR > 1:
            place = tl.multiple_of(place, 16)
    if ignored != 0:
        tl.store(loss + row, 0.0)
        store_nothing(row, lse, nll, entropy, predictions, hits, z_term, log_sum_sq, mean_logit)
        if grad is not None:
            fill(place, 0.0, off, 0, last, vocabulary, BLOCK, RAGGED, VECTOR)
    else:
        own, size, in_order = _row_of_ids(offsets, row, count, entries, shift, SHIFTED)
        if target_logits is None:
            z_y = tl.load(source + y).to(tl.float32)
        else:
            z_y = tl.load(target_logits + here)

        # Pass 1: the largest x, and whether the target is in the support.
        peaks = tl.full([BLOCK], -float("inf"), tl.float32)
        present = tl.zeros([BLOCK], tl.int32)
        strange = tl.zeros([BLOCK], tl.int32)
        top = -float("inf")
        found = tl.full((), NOWHERE, tl.int64)
        for first in range(0, size, BLOCK):
            classes, inside, known = _classes_of(ids + own, first, size, vocabulary, BLOCK)
            present = tl.where(known & (classes == y), 1, present)
            strange = tl.where(inside & ~known, 1, strange)
            z = _logits_of(source, classes, known, y, z_y)
            x = activate(z, logit_scale, softcap, SCALED, CAPPED, False)
            peaks = tl.maximum(peaks, tl.where(known, x, -float("inf")))
            if PREDICTED:
                key = order(z, known, logit_scale, SCALED)
                largest = tl.max(key, 0)
                lowest = tl.min(tl.where(known & (key == largest), classes, NOWHERE), 0)
                found = tl.where(largest > top, lowest, tl.where(largest == top, tl.minimum(found, lowest), found))
                top = tl.maximum(top, largest)
        m = finite(tl.max(peaks, 0))
        has_target = tl.max(present, 0) > 0
        broken = (tl.max(strange, 0) > 0) | ~in_order

        # Pass 2: the sums. All except `v` exclude the target.
        s = tl.zeros([BLOCK], tl.float32)
        t = s
        q = s
        v = s
        for first in range(0, size, BLOCK):
            classes, inside, known = _classes_of(ids + own, first, size, vocabulary, BLOCK)
            z = _logits_of(source, classes, known, y, z_y)
            x = activate(z, logit_scale, softcap, SCALED, CAPPED, False)
            e2 = tl.where(known & (classes != y), (x - m) * LOG2E, -float("inf"))
            e = tl.math.exp2(e2)
            s += e
            t += e * tl.maximum(e2, FLOOR)
            q += e * e
            v += tl.where(known, x, 0.0)
        others = tl.sum(s, 0)
        x_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED, False)
        e2_y = tl.where(has_target, (x_y - m) * LOG2E, -float("inf"))
        e_y = tl.math.exp2(e2_y)
        row_nll, log_sum, _cost = losses(others, e_y, e2_y, 0.0, 0.0, 1.0, 1.0, 0.0, False)
        row_nll = tl.where(has_target, row_nll, float("inf"))
        row_entropy = entropy_of(tl.sum(t, 0), others, e_y, e2_y, row_nll, log_sum)
        row_entropy = tl.where(size == 0, 0.0, row_entropy)

        nan = float("nan")
        cost = tl.where(broken | invalid, nan, row_nll)
        tl.store(loss + row, cost)
        record(lse, row, tl.where(broken, nan, m + log_sum))
        record(nll, row, cost)
        record(entropy, row, tl.where(broken, nan, row_entropy))
        found = tl.where(top == -float("inf"), 0, found)
        record(predictions, row, found)
        record(hits, row, tl.where((found == y) & ~invalid, 1.0, 0.0))
        if log_sum_sq is not None:
            logged = log_of_squares(tl.sum(q, 0), others, e_y, row_nll, log_sum)
            tl.store(log_sum_sq + row, tl.where(broken, nan, tl.where(size == 0, -float("inf"), logged)))
        record(mean_logit, row, tl.where(broken, nan, tl.sum(v, 0) / tl.maximum(size, 1)))

        if grad is not None:
            r = 0.0 if STATISTICS else 1.0
            if upstream is not None:
                r = tl.load(upstream + row * upstream_stride).to(tl.float32)
            gamma, excess, beta = with_statistics(
                r, 0.0, row, row_entropy, lse_upstream, lse_upstream_stride, nll_upstream, nll_upstream_stride,
                entropy_upstream, entropy_upstream_stride,
            )  # fmt: skip
            gamma = tl.where(row_nll == float("inf"), 0.0, gamma)
            total = others + e_y
            g_y = target_gradient(
                z_y, others, total, e_y, gamma, excess, beta, row_nll, 0.0, 1.0, logit_scale, softcap,
                SCALED, CAPPED, TILTED,
            )  # fmt: skip
            for first in range(0, size, BLOCK):
                classes, inside, known = _classes_of(ids + own, first, size, vocabulary, BLOCK)
                z = _logits_of(source, classes, known, y, z_y)
                log_p = (activate(z, logit_scale, softcap, SCALED, CAPPED, False) - m) - log_sum
                g = (gamma + excess) * exp(log_p)
                if TILTED:
                    g += beta * times(exp(log_p), log_p)
                if CAPPED or SCALED:
                    g *= slope(z, logit_scale, softcap, SCALED, CAPPED, False)
                tl.store(held + own + first + tl.arange(0, BLOCK), tl.where(classes == y, g_y, g), mask=known)
            tl.debug_barrier()
            fill(place, tl.where(broken | invalid, nan, 0.0), off, 0, last, vocabulary, BLOCK, RAGGED, VECTOR)
            tl.debug_barrier()
            for first in range(0, size, BLOCK):
                classes, inside, known = _classes_of(ids + own, first, size, vocabulary, BLOCK)
                g = tl.load(held + own + first + tl.arange(0, BLOCK), mask=known, other=0.0)
                g = tl.where(broken | invalid, nan, g)
                tl.store(place + (off + classes), g.to(grad.dtype.element_ty), mask=known)
