"""The gradient of rows, computed from their saved sums. One program per part of a row.

It is used in the backward pass of per-row losses.
"""

import triton.language as tl

from xent.backends.triton.launch import kernel
from xent.backends.triton.row_algebra import bend_of_row, gradient_factor, position, row_facts
from xent.backends.triton.row_gradient import from_norm, write_gradient
from xent.backends.triton.row_memory import fill

__all__ = ["gradient_kernel"]


@kernel
def gradient_kernel(
    logits,  # see `rows_kernel` for arguments that are not described here
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
    entropy,  # (N,), from the forward pass, if it has an upstream gradient
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
    GROUPED: tl.constexpr,  # rows are in several groups, see `position`
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
    BLOCKS: tl.constexpr,  # number of blocks of a row that a program writes
):
    """Write the gradient of one part of one row."""
    TILTED: tl.constexpr = entropy_upstream is not None
    STATISTICS: tl.constexpr = TILTED or ((lse_upstream is not None) or (nll_upstream is not None))
    parts = tl.cdiv(vocabulary + (VECTOR - 1 if SKEWED else 0), BLOCKS * BLOCK)
    here = (tl.program_id(0) // parts).to(tl.int64)
    first = tl.program_id(0) % parts * (BLOCKS * BLOCK)
    row = start + here
    y, a, w_y, ignored, invalid = row_facts(
        row, row < count, target, sample_weight, class_weight, length, shift, ignore_index, vocabulary, SHIFTED, False
    )
    y = y.to(tl.int32)
    softcap, logit_scale = bend_of_row(row, bend, bend_stride, softcap, logit_scale, count, shift, SHIFTED)
    inverse = 1.0
    if MEAN:
        inverse = tl.load(scratch + 1)
    dead, r = gradient_factor(a, inverse, invalid, row, upstream, upstream_stride, STATISTICS)
    begin = position(here, logits_inner, logits_outer, logits_row, GROUPED)
    off = 0
    if SKEWED:
        off = ((skew + begin) % VECTOR).to(tl.int32)
    source = tl.multiple_of(logits + (begin - off), 16) if VECTOR > 1 else logits + begin
    place = grad + (position(here, grad_inner, grad_outer, grad_row, GROUPED) - off)
    if VECTOR > 1:
        place = tl.multiple_of(place, 16)
    last = tl.minimum(first + (BLOCKS - 1) * BLOCK, (vocabulary + off - 1) // BLOCK * BLOCK)
    # An aligned row may have one part less than a skewed row.
    if ((ignored if STATISTICS else dead) | (first > last)) != 0:
        fill(place, 0.0, off, first, last, vocabulary, BLOCK, RAGGED, VECTOR)
    else:
        whole = (vocabulary + off + VECTOR - 1) // VECTOR * VECTOR
        z_y = tl.load(logits + begin + y).to(tl.float32)
        tl.debug_barrier()  # the gradient may overwrite the logits
        total_weight = 0.0
        if SMOOTHED:
            total_weight = vocabulary * 1.0
            if class_weight is not None:
                total_weight = tl.load(class_weight_total)
        m, exact, factor, tilt, delta, g_y = from_norm(
            norm, row, count, z_y, r, w_y, total_weight, entropy, lse_upstream, lse_upstream_stride, nll_upstream,
            nll_upstream_stride, entropy_upstream, entropy_upstream_stride, keep, spread, z_loss, logit_scale, softcap,
            EXACT, SMOOTHED, Z_LOSS, SCALED, CAPPED, TILTED,
        )  # fmt: skip
        if EXACT | exact:
            write_gradient(
                source, place, off, first, last, vocabulary, whole, m, exact, factor, tilt, delta, class_weight,
                logit_scale, softcap, BLOCK, RAGGED, VECTOR, SKEWED, False, True, QUICK, SCALED, CAPPED, SMOOTHED,
                TILTED, False,
            )  # fmt: skip
        else:
            write_gradient(
                source, place, off, first, last, vocabulary, whole, m, exact, factor, tilt, delta, class_weight,
                logit_scale, softcap, BLOCK, RAGGED, VECTOR, SKEWED, False, False, QUICK, SCALED, CAPPED, SMOOTHED,
                TILTED, False,
            )  # fmt: skip
        if (y + off >= first) & (y + off < last + BLOCK):
            tl.debug_barrier()
            tl.store(place + (off + y), g_y.to(grad.dtype.element_ty))
