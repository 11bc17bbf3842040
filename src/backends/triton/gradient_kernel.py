"""The gradient of rows whose sums are known, a program for each block of a row: the backward pass of per-row losses."""

import triton.language as tl

from xent.backends.triton.launch import kernel
from xent.backends.triton.maths import activate, exponent, is_exact
from xent.backends.triton.row_algebra import (
    bend_of_row,
    coefficients,
    factors,
    log_total,
    losses,
    position,
    row_facts,
    with_statistics,
)
from xent.backends.triton.row_gradient import gradient_block, target_gradient
from xent.backends.triton.row_memory import fetch_if, store

__all__ = ["gradient_kernel"]


@kernel
def gradient_kernel(
    logits,  # arguments of the same names are those of `rows_kernel`
    logits_inner: "i64",
    logits_outer: "i64",
    logits_row: "i64",
    skew: "i64",
    grad,
    grad_inner: "i64",
    grad_outer: "i64",
    grad_row: "i64",
    start: "i64",
    target,
    sample_weight,
    class_weight,
    class_weight_total,
    upstream,
    upstream_stride: "i64",
    lse_upstream,
    lse_upstream_stride: "i64",
    nll_upstream,
    nll_upstream_stride: "i64",
    entropy_upstream,
    entropy_upstream_stride: "i64",
    scratch,
    norm,  # (3, N): m, others, total
    entropy,  # (N,), as the forward pass found it; where it has an upstream gradient
    count: "i64",
    length: "i64",
    shift: "i64",
    ignore_index: "i64",
    vocabulary: "i32",
    keep: "fp32",
    spread: "fp32",
    z_loss: "fp32",
    softcap: "fp32",
    logit_scale: "fp32",
    bend,
    bend_stride: "i64",
    SHIFTED: tl.constexpr,
    GROUPED: tl.constexpr,  # rows of a tensor lie in groups
    MEAN: tl.constexpr,
    SKEWED: tl.constexpr,
    RAGGED: tl.constexpr,
    VECTOR: tl.constexpr,
    EXACT: tl.constexpr,
    QUICK: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one block of one row."""
    TILTED: tl.constexpr = entropy_upstream is not None
    STATISTICS: tl.constexpr = TILTED or ((lse_upstream is not None) or (nll_upstream is not None))
    blocks = tl.cdiv(vocabulary + (VECTOR - 1 if SKEWED else 0), BLOCK)
    here = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK
    row = start + here
    y, a, w_y, ignored, invalid = row_facts(
        row, row < count, target, sample_weight, class_weight, length, shift, ignore_index, vocabulary, SHIFTED, False
    )
    y = y.to(tl.int32)
    softcap, logit_scale = bend_of_row(row, bend, bend_stride, softcap, logit_scale, count, shift, SHIFTED)
    inverse = 1.0
    if MEAN:
        inverse = tl.load(scratch + 1)
    dead = ((a == 0) | (inverse == 0)) & ~invalid
    r = tl.where(invalid, float("nan"), a * inverse)
    if upstream is not None:
        r *= tl.load(upstream + row * upstream_stride).to(tl.float32)
    else:
        r = tl.where(invalid, float("nan"), 0.0)
    if STATISTICS:
        r = tl.where(dead, 0.0, r)
    begin = position(here, logits_inner, logits_outer, logits_row, GROUPED)
    off = 0
    if SKEWED:
        off = ((skew + begin) % VECTOR).to(tl.int32)
    source = tl.multiple_of(logits + (begin - off), 16) if VECTOR > 1 else logits + begin
    place = grad + (position(here, grad_inner, grad_outer, grad_row, GROUPED) - off)
    if VECTOR > 1:
        place = tl.multiple_of(place, 16)
    whole = (vocabulary + off + VECTOR - 1) // VECTOR * VECTOR
    z = fetch_if(~ignored, source, first, whole, BLOCK, "evict_first").to(tl.float32)
    if ignored if STATISTICS else dead:
        store(place, first, tl.zeros([BLOCK], tl.float32), off, vocabulary, BLOCK, True, RAGGED, VECTOR)
    else:
        classes = first + tl.arange(0, BLOCK) - off
        m = tl.load(norm + row)
        others = tl.load(norm + count + row)
        total = tl.load(norm + 2 * count + row)
        total_weight = 0.0
        if SMOOTHED:
            total_weight = vocabulary * 1.0
            if class_weight is not None:
                total_weight = tl.load(class_weight_total)
        log_sum = 0.0
        if Z_LOSS or TILTED:
            log_sum = log_total(others, total - others)
        gamma, excess, delta = coefficients(r, w_y, total_weight, m + log_sum, keep, spread, z_loss, SMOOTHED, Z_LOSS)
        row_entropy = 0.0
        if TILTED:
            row_entropy = tl.load(entropy + row)
        gamma, excess, beta = with_statistics(
            gamma, excess, row, row_entropy, lse_upstream, lse_upstream_stride, nll_upstream, nll_upstream_stride,
            entropy_upstream, entropy_upstream_stride,
        )  # fmt: skip
        factor, tilt = factors(gamma, excess, beta, log_sum, total, TILTED)
        exact = is_exact(m, EXACT)
        g = gradient_block(
            z, classes, vocabulary, m, exact, factor, tilt, delta, class_weight, logit_scale, softcap,
            True, QUICK, SCALED, CAPPED, SMOOTHED, TILTED, False,
        )  # fmt: skip
        if (y + off >= first) & (y + off < first + BLOCK):
            z_y = tl.sum(tl.where(classes == y, z, 0.0), 0)
            x_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED, False)
            e2_y = exponent(x_y, m, exact)
            e_y = tl.math.exp2(e2_y)
            nll = 0.0
            if TILTED:
                nll, _log_sum, _cost = losses(others, e_y, e2_y, 0.0, 0.0, w_y, keep, spread, False)
            g_y = target_gradient(
                z_y, others, total, e_y, gamma, excess, beta, nll, delta, w_y, logit_scale, softcap,
                SCALED, CAPPED, TILTED,
            )  # fmt: skip
            g = tl.where(classes == y, g_y, g)
        store(place, first, g, off, vocabulary, BLOCK, True, RAGGED, VECTOR)
