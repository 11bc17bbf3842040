"""Divergences, their derivatives and the entropy of whole rows, in MLX's own operations.

See `xent.backends.torch.portable.divergence` for the sums.
"""

import math

import mlx.core as mx

from xent.backends.mlx.devices import device_type
from xent.backends.mlx.elementwise import exp as exp64
from xent.backends.mlx.top_k import Known
from xent.core.call import Options

__all__ = ["entropy", "from_top_k", "full"]

_ADDED = 32


def entropy(x: mx.array) -> mx.array:
    """Return -sum_c p_c log p_c, (R,)."""
    log_p, p = _softmax(x)
    return 0 - _sum(mx.where(p == 0, 0, p * log_p))


def full(options: Options, x: mx.array, t: mx.array) -> tuple[mx.array, mx.array]:
    """Return the divergence (R,) of full distributions, and its derivative (R, V) with respect to x."""
    beta, (log_p, p), (log_q, q) = options.beta, _softmax(x), _softmax(t)
    if options.kind == "tv":
        return _sum(mx.abs(p - q)) / 2, _pulled(p, mx.sign(p - q) / -2)
    if beta == 0:
        return _sum(_gaps(q, p, log_p - log_q)), p - q
    apart = log_q - log_p
    if beta == 1:
        return _sum(_gaps(p, q, apart)), _pulled(p, apart)
    acc = x.dtype
    share = mx.where(apart > 0, mx.array(1 - beta, acc), mx.array(beta, acc))
    common = mx.log1p(share * mx.expm1(-mx.abs(apart)))
    from_p, from_q = common + mx.maximum(apart, 0), common - mx.minimum(apart, 0)
    m = (1 - beta) * p + beta * q
    found = beta * _sum(_gaps(q, m, from_q)) + (1 - beta) * _sum(_gaps(p, m, from_p))
    return found, _pulled(p, from_p) * (1 - beta)


def from_top_k(kind: str, x: mx.array, teacher: Known) -> tuple[mx.array, mx.array]:
    """Return the divergence (R,) from K classes of each row, and its derivative (R, V)."""
    vocabulary, ids, log_q = x.shape[-1], teacher.ids, teacher.log_q
    known = (log_q != -mx.inf) & (ids < vocabulary)
    log_p, p = _softmax(x)
    if teacher.tail == "renormalize":
        log_q = log_q - _log_sum_exp(log_q)[:, None]
    q = mx.where(known, _exp(log_q), 0)
    mass = _sum(q)
    safe = mx.minimum(ids, vocabulary - 1)
    log_p_k, p_k = (mx.take_along_axis(values, safe, -1) for values in (log_p, p))
    left = mx.zeros_like(mass)
    derivative = p
    if teacher.tail == "bucket" or kind == "tv":
        others = _put(x, ids, mx.full(ids.shape, -mx.inf, x.dtype))
        empty = mx.max(others, axis=-1) == -mx.inf
        others = mx.where(empty[:, None], 0, others)
        _, shares = _softmax(others)
        log_p_left = mx.where(empty, -mx.inf, _log_sum_exp(others) - _log_sum_exp(x))
        left = mx.maximum(1 - mass, 0) if teacher.tail == "bucket" else left
        # The remaining mass is only rounding if no other class can have it.
        left = mx.where(empty & (left <= teacher.tolerance), 0, left)
        if kind == "tv":
            of_ids, of_others = mx.where(known, p_k - q, 0), _exp(log_p_left) - left
            signs = _put(mx.broadcast_to(mx.sign(of_others)[:, None], x.shape), ids, mx.sign(of_ids))
            return (_sum(mx.abs(of_ids)) + mx.abs(of_others)) / 2, _pulled(p, signs / -2)
        cells = _sum(mx.where(known, _gaps(q, p_k, log_p_k - log_q), 0))
        rest = _gaps(left, _exp(log_p_left), log_p_left - mx.log(left))
        found = cells + rest + (mass + left - 1)
        derivative = p * (mass + left)[:, None] - left[:, None] * shares
    else:
        found = mx.where(known, q * (log_q - log_p_k), 0).sum(-1)
        derivative = p * mass[:, None]
    return found, _put(derivative, ids, p_k * (mass + left)[:, None] - q)


def _exp(x: mx.array) -> mx.array:
    """Return e^x for x <= 0. On the CPU MLX's own has an error of up to 14 units in the last place far from 0."""
    if x.dtype == mx.float64 or device_type() != "cpu":
        return exp64(x)
    near = mx.maximum(x, -100)
    whole = mx.round(near * (1 / math.log(2)))
    # ln 2 is split in two parts; the first has few bits, so that the product with it is exact.
    rest = near - whole * 0.693359375 + whole * 2.12194440e-4
    return mx.where(x < -87, 0, (1 + mx.expm1(rest)) * mx.power(mx.array(2.0, mx.float32), whole))


def _sum(values: mx.array) -> mx.array:
    """Return the sum over the last axis. On a CPU sum parts first, because MLX's sequential sum loses precision."""
    count = values.shape[-1]
    if count <= _ADDED or device_type() != "cpu":
        return values.sum(-1)
    whole = count // _ADDED * _ADDED
    parts = _sum(values[..., :whole].reshape(*values.shape[:-1], -1, _ADDED).sum(-1))
    return parts if whole == count else parts + values[..., whole:].sum(-1)


def _log_sum_exp(x: mx.array) -> mx.array:
    """Return log sum_c exp(x_c), (R,). On the CPU MLX's own is computed in float32 for every dtype."""
    largest = mx.max(x, axis=-1, keepdims=True)
    return largest[:, 0] + mx.log(_sum(_exp(x - largest)))


def _softmax(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return log p and p; p is more accurate than the exponential of the rounded log p."""
    y = x - mx.max(x, axis=-1, keepdims=True)
    e = _exp(y)
    total = _sum(e)[:, None]
    return y - mx.log(total), e / total


def _put(values: mx.array, ids: mx.array, new: mx.array) -> mx.array:
    """Return values (R, V) with new ones (R, K) at the classes `ids`; id V is ignored."""
    wide = mx.concatenate([values, mx.zeros((len(values), 1), values.dtype)], axis=-1)
    return mx.put_along_axis(wide, ids, new.astype(values.dtype), axis=-1)[:, : values.shape[-1]]


def _gaps(w: mx.array, o: mx.array, u: mx.array) -> mx.array:
    """Return w (e^u - 1 - u) for o = w e^u, computed as o - w - w u if e^u is large; o where w is 0."""
    near = mx.minimum(u, 1)
    gap = mx.where(u > 1, o - w - w * u, w * mx.maximum(mx.expm1(near) - near, 0))
    return mx.where(w == 0, o, gap)


def _pulled(p: mx.array, u: mx.array) -> mx.array:
    """Return p (sum_c p_c u_c - u), 0 where p is 0; see `refold` in `xent.backends.torch.portable.divergence`."""
    u = u - mx.take_along_axis(u, mx.argmax(p, axis=-1, keepdims=True), -1)
    mean = _sum(mx.where(p == 0, 0, p * u))[:, None]
    return mx.where(p == 0, 0, p * (mean - u))
