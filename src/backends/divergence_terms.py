"""The terms of a divergence, for PyTorch and MLX, which have the same names for the operations here.

With u = log o - log w, a divergence sum_c w (log w - log o) of distributions w and o is computed as the sum of ::

    w (e^u - 1 - u) = o - w - w u    >= 0

The sums are equal, because w and o each sum to 1. No term is negative, and an error of either log-sum-exp, which is
common to all u of a row, enters only squared. So close distributions lose no precision, and equal ones give exactly 0.
"""

from typing import Any

from xent.core.call import Options, TopK, tolerance
from xent.core.spec import Array

__all__ = ["divergence_terms", "teacher_cells"]


def divergence_terms(
    ops: Any, options: Options, p: Array, q: Array, log_p: Array, log_q: Array
) -> tuple[Array, Array | None, float]:
    """Return the terms of the divergence per class, and v and f: dl/dx_c = f p_c (sum_k p_k v_k - v_c).

    `ops`: the module of the framework. The logarithms may both lack one number. v is None where dl/dx_c is p_c - q_c.
    """
    beta = options.beta
    if options.kind == "tv":
        apart = p - q
        return ops.abs(apart) / 2, ops.sign(apart) / -2, 1
    if beta == 0:
        return _gaps(ops, q, p, log_p - log_q), None, 1
    apart = log_q - log_p
    if beta == 1:
        return _gaps(ops, p, q, apart), apart, 1
    # log m - log p = log((1 - beta) + beta e^apart), and similarly log m - log q; start from the larger of p and q.
    share = ops.where(apart > 0, 1 - beta, ops.full_like(apart, beta))
    common = ops.log1p(share * ops.expm1(-ops.abs(apart)))
    from_p, from_q = common + ops.clip(apart, 0, None), common - ops.clip(apart, None, 0)
    m = (1 - beta) * p + beta * q
    return beta * _gaps(ops, q, m, from_q) + (1 - beta) * _gaps(ops, p, m, from_p), from_p, 1 - beta


def teacher_cells(
    ops: Any, teacher: TopK, q: Array, log_q: Array, mass: Array, empty: Array
) -> tuple[Array, Array, Array]:
    """Return q and log q (R, K + 1) of K classes and of all others as one more cell, and the sum (R, 1) of q.

    `q` and `log_q` (R, K) are those of the K classes, `mass` (R, 1) is the sum of q, and `empty` (R, 1) says whether a
    row has no other classes.
    """
    left = ops.clip(1 - mass, 0, None) if teacher.tail == "bucket" else ops.zeros_like(mass)
    # The remaining mass is only rounding if no other class can have it.
    left = ops.where(empty & (left <= tolerance(teacher)), 0, left)
    return ops.concatenate([q, left], -1), ops.concatenate([log_q, ops.log(left)], -1), mass + left


def _gaps(ops: Any, w: Array, o: Array, u: Array) -> Array:
    """Return w (e^u - 1 - u) for o = w e^u, computed as o - w - w u if e^u is large; o where w is 0."""
    near = ops.clip(u, None, 1)
    gap = ops.where(u > 1, o - w - w * u, w * ops.clip(ops.expm1(near) - near, 0, None))
    return ops.where(w == 0, o, gap)
