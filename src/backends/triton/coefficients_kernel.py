"""Per-row coefficients of the gradient of the logits, computed from the row's sums without the logits."""

import triton.language as tl

from xent.backends.triton.launch import kernel
from xent.backends.triton.maths import activate, exponent, is_exact
from xent.backends.triton.row_algebra import coefficients, factors, log_total, losses, row_facts, with_statistics
from xent.backends.triton.row_gradient import target_gradient

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
    dead = (a == 0) & ~invalid
    r = tl.where(invalid, float("nan"), a)
    if upstream is not None:
        r *= tl.load(upstream + row * upstream_stride).to(tl.float32)
    else:
        r = tl.where(invalid, float("nan"), 0.0)
    if STATISTICS:
        r = tl.where(dead, 0.0, r)
    m = tl.load(norm + row)
    others = tl.load(norm + count + row)
    total = tl.load(norm + 2 * count + row)
    log_sum = 0.0
    if Z_LOSS or TILTED:
        log_sum = log_total(others, total - others)
    gamma, excess, delta = coefficients(r, w_y, 0.0, m + log_sum, keep, spread, z_loss, False, Z_LOSS)
    row_entropy = 0.0
    if TILTED:
        row_entropy = tl.load(entropy + row)
    gamma, excess, beta = with_statistics(
        gamma, excess, row, row_entropy, lse_upstream, lse_upstream_stride, nll_upstream, nll_upstream_stride,
        entropy_upstream, entropy_upstream_stride,
    )  # fmt: skip
    factor, tilt = factors(gamma, excess, beta, log_sum, total, TILTED)
    z_y = tl.load(target_logits + here)
    e2_y = exponent(activate(z_y, logit_scale, softcap, SCALED, CAPPED, False), m, is_exact(m, True))
    e_y = tl.math.exp2(e2_y)
    nll = 0.0
    if TILTED:
        nll, _log_sum, _cost = losses(others, e_y, e2_y, 0.0, 0.0, w_y, keep, spread, False)
    g_y = target_gradient(
        z_y, others, total, e_y, gamma, excess, beta, nll, delta, w_y, logit_scale, softcap, SCALED, CAPPED, TILTED
    )
    rows = tl.num_programs(0)
    tl.store(made + here, m)
    tl.store(made + rows + here, factor)
    tl.store(made + 2 * rows + here, g_y)
    if TILTED:
        tl.store(made + 3 * rows + here, tilt)
    tl.store(classes + here, tl.where(ignored if STATISTICS else dead, -2, y).to(tl.int32))
