"""Per-row coefficients of the gradient of the logits, computed from the row's sums without the logits."""

import triton.language as tl

from xent.backends.triton.launch import kernel
from xent.backends.triton.row_algebra import gradient_factor, row_facts
from xent.backends.triton.row_gradient import from_norm

__all__ = ["coefficients_kernel"]


@kernel
def coefficients_kernel(
    made,  # (4, R) float32: m, factor, the target's gradient, tilt; see `gradient_product_kernel`
    classes,  # (R,) int32: the target, or -2 where the gradient is 0
    target_logits,  # (R,) float32
    order,  # see `gradient_kernel` for other arguments; rows are order[start:], or start, start + 1, ...
    start: "i64",
    target,
    sample_weight,
    class_weight,
    upstream,
    upstream_stride: "i64",
    lse_upstream,
    lse_upstream_stride: "i64",
    nll_upstream,
    nll_upstream_stride: "i64",
    entropy_upstream,
    entropy_upstream_stride: "i64",
    norm,
    entropy,
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
    SHIFTED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Compute the coefficients of one row of a loss with reduction "none"."""
    TILTED: tl.constexpr = entropy_upstream is not None
    STATISTICS: tl.constexpr = TILTED or ((lse_upstream is not None) or (nll_upstream is not None))
    here = tl.program_id(0).to(tl.int64)
    row = start + here
    if order is not None:
        row = tl.load(order + row)
    y, a, w_y, ignored, invalid = row_facts(
        row, row < count, target, sample_weight, class_weight, length, shift, ignore_index, vocabulary, SHIFTED, False
    )
    dead, r = gradient_factor(a, 1.0, invalid, row, upstream, upstream_stride, STATISTICS)
    m, _exact, factor, tilt, _delta, g_y = from_norm(
        norm, row, count, tl.load(target_logits + here), r, w_y, 0.0, entropy, lse_upstream, lse_upstream_stride,
        nll_upstream, nll_upstream_stride, entropy_upstream, entropy_upstream_stride, keep, spread, z_loss,
        logit_scale, softcap, True, False, Z_LOSS, SCALED, CAPPED, TILTED,
    )  # fmt: skip
    rows = tl.num_programs(0)
    tl.store(made + here, m)
    tl.store(made + rows + here, factor)
    tl.store(made + 2 * rows + here, g_y)
    if TILTED:
        tl.store(made + 3 * rows + here, tilt)
    tl.store(classes + here, tl.where(ignored if STATISTICS else dead, -2, y).to(tl.int32))
