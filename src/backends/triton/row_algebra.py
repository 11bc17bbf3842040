"""The row algebra in Triton: the facts of a row, its sums, its loss, and the coefficients of its gradient.

With x, e, w, a as in `xent.cross_entropy`, upstream gradient u, divisor D, r = a u / D and W = sum_c w_c, a row's sums
relative to a reference m are::

    others = sum_{c != y} e^(x_c - m)        total = others + e^(x_y - m)        lse = m + log total
    mixed  = sum_c e^(x_c - m) (x_c - m)     below = sum_c w_c (m - x_c)

The loss (`losses`) and the gradient (`coefficients`) follow from them::

    dl/dx_c = p_c (gamma + excess + beta log p_c) - gamma [c == y] - delta w_c
    gamma = r (1-e) w_y        excess = r ((e/V) W + 2 zeta lse)        delta = r e/V        beta = 0

For the target this is gamma (p_y - 1) + p_y (excess + beta log p_y) - delta w_y, and p_y - 1 = -others / total has no
cancellation. Upstream gradients u of lse, n of nll and v of the entropy H add n to gamma, u - v H to excess and -v to
beta, also for rows with sample weight 0.
"""

import triton
import triton.language as tl

from xent.backends.triton.maths import FLOOR, LN2, log1p, times

__all__ = [
    "bend_of_row",
    "coefficients",
    "entropy_of",
    "factors",
    "gradient_factor",
    "inverse_of",
    "inverse_of_few",
    "log_of_squares",
    "log_total",
    "losses",
    "position",
    "row_facts",
    "with_statistics",
]


@triton.jit
def position(row, inner, outer_stride, row_stride, GROUPED: tl.constexpr):
    """Return the offset of a row in elements. GROUPED: groups of `inner` rows are `outer_stride` elements apart."""
    row = row.to(tl.int64)
    if GROUPED:
        return (row // inner) * outer_stride + (row % inner) * row_stride
    else:
        return row * row_stride


@triton.jit
def row_facts(
    row,
    inside,
    target,
    sample_weight,
    class_weight,
    length,
    shift,
    ignore_index,
    vocabulary,
    SHIFTED: tl.constexpr,
    PROBABILITIES: tl.constexpr,
):
    """Return target class, weight a, class weight w_y, ignored, invalid of a row or a block of rows.

    The target is that of row t + shift of the same sequence of `length` rows. Rows outside of the mask `inside` are
    ignored. An ignored or invalid row has class 0. With PROBABILITIES every row has class -1.
    """
    has_target = inside
    source = row
    if SHIFTED:
        has_target = inside & (row % length + shift < length)
        source = row + shift
    if PROBABILITIES:
        ignored = ~has_target
        invalid = ignored & has_target
        y = tl.where(ignored, -1, -1).to(tl.int64)
    else:
        y = tl.load(target + source, mask=has_target, other=0).to(tl.int64)
        ignored = (y == ignore_index) | ~has_target
        invalid = ((y < 0) | (y >= vocabulary)) & ~ignored
        y = tl.where(ignored | invalid, 0, y)
    if sample_weight is None:
        a = tl.where(ignored, 0.0, 1.0)
    else:
        a = tl.where(ignored, 0.0, tl.load(sample_weight + source, mask=has_target, other=0.0).to(tl.float32))
    w_y = tl.where(ignored, 1.0, 1.0)
    if class_weight is not None and not PROBABILITIES:
        w_y = tl.load(class_weight + y).to(tl.float32)
    return y, a, w_y, ignored, invalid


@triton.jit
def inverse_of(d):
    """Return 1 / d, or 0 if d is 0."""
    return tl.where(d == 0, 0.0, tl.div_rn(tl.full((), 1.0, tl.float32), tl.where(d == 0, 1.0, d)))


@triton.jit
def inverse_of_few(
    scratch, stores, count, target, length, shift, ignore_index, vocabulary, SHIFTED: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Return 1 / D for a mean over up to FEW rows without weights. With `stores`, write D and 1 / D to `scratch`."""
    rows = tl.arange(0, FEW)
    _y, a, _w_y, _ignored, wrong = row_facts(
        rows, rows < count, target, None, None, length, shift, ignore_index, vocabulary, SHIFTED, False
    )
    d = tl.sum(tl.where(wrong, 0.0, a), 0)
    inverse = inverse_of(d)
    tl.store(scratch, d, mask=stores)
    tl.store(scratch + 1, inverse, mask=stores)
    return inverse


@triton.jit
def gradient_factor(a, inverse, invalid, row, upstream, upstream_stride, STATISTICS: tl.constexpr):
    """Return whether a row's loss and gradient are 0, and r, with `inverse` = 1 / D; NaN for an invalid target.

    STATISTICS: there are upstream gradients of statistics. The loss then has none if `upstream` is None, and a row
    whose loss is 0 has a gradient, for which r is 0.
    """
    dead = ((a == 0) | (inverse == 0)) & ~invalid
    r = tl.where(invalid, float("nan"), a * inverse)
    if upstream is not None:
        r *= tl.load(upstream + row * upstream_stride).to(tl.float32)
    elif STATISTICS:
        r = tl.where(invalid, float("nan"), 0.0)
    if STATISTICS:
        r = tl.where(dead, 0.0, r)
    return dead, r


@triton.jit
def bend_of_row(row, bend, bend_stride, softcap, logit_scale, count, shift, SHIFTED: tl.constexpr):
    """Return softcap and logit scale of a row or a block of rows.

    `bend` (N, 2) contains logit scale and softcap of each position of the target. If it is None, the numbers are used.
    """
    if bend is None:
        return softcap, logit_scale
    else:
        source = row + shift if SHIFTED else row
        place = bend + source * bend_stride
        own_scale = tl.load(place, mask=source < count, other=1.0).to(tl.float32)
        return tl.load(place + 1, mask=source < count, other=1.0).to(tl.float32), own_scale


@triton.jit
def log_total(others, e_y):
    """Return log(others + e_y) with full precision, also if e_y is nearly the whole sum."""
    sure = e_y >= others
    return tl.where(
        sure,
        tl.log(tl.where(sure, e_y, 1.0)) + log1p(others / tl.where(sure, e_y, 1.0)),
        tl.log(others + e_y),
    )


@triton.jit
def losses(others, e_y, log2_e_y, below, total_weight, w_y, keep, spread, SMOOTHED: tl.constexpr):
    """Return -log p_y, log(total), and the row's loss without z-loss and sample weight.

    `log2_e_y` is the base-2 exponent of e_y. `below` is the sum over all classes.
    """
    above = log1p(others / tl.where(e_y > 0, e_y, 1.0))
    logged = tl.log(others + e_y)
    x_y = log2_e_y * LN2
    nll = tl.where((e_y >= others) & (e_y > 0), above, logged - x_y)
    cost = times(keep * w_y, nll)
    if SMOOTHED:
        cost += spread * (total_weight * tl.where(e_y >= others, x_y + above, logged) + below)
    return nll, tl.where((e_y >= others) & (e_y > 0), x_y + above, logged), cost


@triton.jit
def entropy_of(mixed, others, e_y, log2_e_y, nll, log_sum):
    """Return -sum_c p_c log p_c with full precision, also if the target has nearly all probability.

    `mixed` is the sum over all classes except the target. `mixed` and `log2_e_y` are in units of log2.
    """
    total = others + e_y
    near = nll + LN2 * ((log2_e_y * others - mixed) / total)
    far = log_sum - LN2 * ((mixed + times(e_y, tl.maximum(log2_e_y, FLOOR))) / total)
    return tl.where((e_y >= others) & (e_y > 0), near, far)


@triton.jit
def log_of_squares(squares, others, e_y, nll, log_sum):
    """Return log sum_c p_c^2 with full precision, also if the target has nearly all probability.

    `squares` is the sum of e^(2 (x_c - m)) over all classes except the target.
    """
    square = e_y * e_y
    sure = (e_y >= others) & (square > 0)
    return tl.where(
        sure,
        log1p(squares / tl.where(sure, square, 1.0)) - 2 * nll,
        tl.log(squares + square) - 2 * log_sum,
    )


@triton.jit
def coefficients(r, w_y, total_weight, lse, keep, spread, z_loss, SMOOTHED: tl.constexpr, Z_LOSS: tl.constexpr):
    """Return gamma, excess and delta of a row's gradient."""
    gamma = r * keep * w_y
    excess = r * 0
    if SMOOTHED:
        excess += r * spread * total_weight
    if Z_LOSS:
        excess += 2 * r * z_loss * lse
    return gamma, excess, r * spread


@triton.jit
def with_statistics(
    gamma, excess, row, entropy,
    lse_upstream, lse_upstream_stride, nll_upstream, nll_upstream_stride, entropy_upstream, entropy_upstream_stride,
):  # fmt: skip
    """Add the upstream gradients of a row's lse, nll and entropy that are given. Return gamma, excess and beta."""
    beta = 0.0
    if lse_upstream is not None:
        excess += tl.load(lse_upstream + row * lse_upstream_stride).to(tl.float32)
    if nll_upstream is not None:
        gamma += tl.load(nll_upstream + row * nll_upstream_stride).to(tl.float32)
    if entropy_upstream is not None:
        v = tl.load(entropy_upstream + row * entropy_upstream_stride).to(tl.float32)
        excess -= v * entropy
        beta = -v
    return gamma, excess, beta


@triton.jit
def factors(gamma, excess, beta, log_sum, total, TILTED: tl.constexpr):
    """Return factor and tilt. The gradient of class c is e^(x_c - m) (factor + tilt log2(e) (x_c - m)) - delta w_c."""
    factor = (gamma + excess) / total
    tilt = 0.0
    if TILTED:
        factor -= beta * log_sum / total
        tilt = LN2 * beta / total
    return factor, tilt
