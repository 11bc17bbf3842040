"""The row algebra in Triton: what is known of a row, its sums, and the four numbers that its gradient is made of.

With x, e, w, a as in `xent.cross_entropy`, upstream gradient u, divisor D, r = a u / D and W = sum_c w_c, a row's sums
relative to a reference m are::

    others = sum_{c != y} e^(x_c - m)        total = others + e^(x_y - m)        lse = m + log total
    mixed  = sum_c e^(x_c - m) (x_c - m)     below = sum_c w_c (m - x_c)

and everything else follows from them: `losses`, and the gradient's `coefficients`::

    dl/dx_c = p_c (gamma + excess) - gamma [c == y] - delta w_c
    gamma = r (1-e) w_y        excess = r ((e/V) W + 2 zeta lse)        delta = r e/V

For the target this is gamma (p_y - 1) + excess p_y - delta w_y, and p_y - 1 = -others / total has no cancellation.
"""

import triton
import triton.language as tl

from xent.backends.triton.maths import LN2, log1p, times

__all__ = ["coefficients", "log_total", "losses", "position", "row_facts"]


@triton.jit
def position(row, inner, outer_stride, row_stride, GROUPED: tl.constexpr):
    """Return where a row begins, in elements; GROUPED: rows are `inner` to a group, groups `outer_stride` apart."""
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

    The target is that of row t + shift of the same sequence of `length` rows. Outside `inside` rows are ignored. An
    ignored or invalid row has class 0; with PROBABILITIES every row with a target has class -1.
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
def log_total(others, e_y):
    """Return log(others + e_y), right to all digits also where the target is nearly all of it."""
    sure = e_y >= others
    return tl.where(
        sure,
        tl.log(tl.where(sure, e_y, 1.0)) + log1p(others / tl.where(sure, e_y, 1.0)),
        tl.log(others + e_y),
    )


@triton.jit
def losses(others, e_y, log2_e_y, below, total_weight, w_y, keep, spread, SMOOTHED: tl.constexpr):
    """Return -log p_y, log(total), and the row's loss without z-loss and sample weight.

    `log2_e_y` is the exponent of e_y; `below` has the sum over all classes.
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
def coefficients(r, w_y, total_weight, lse, keep, spread, z_loss, SMOOTHED: tl.constexpr, Z_LOSS: tl.constexpr):
    """Return gamma, excess and delta of a row's gradient."""
    gamma = r * keep * w_y
    excess = r * 0
    if SMOOTHED:
        excess += r * spread * total_weight
    if Z_LOSS:
        excess += 2 * r * z_loss * lse
    return gamma, excess, r * spread
