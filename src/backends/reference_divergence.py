"""The reference implementation of divergences in float64 NumPy. All other backends are tested against it.

It is written to be compared with the formulas of `xent.divergence`, not to be fast. Tests verify its gradients by
finite differences.
"""

from typing import Any

import numpy as np

from xent.backends.reference_logits import Array, activated, float64, gradients, raw, reduced, scaled
from xent.core.arrays import dtype_name
from xent.core.call import Activation, Call, Dense, TopK
from xent.core.spec import mass_tolerance
from xent.core.values import check_top_k

__all__ = ["divergence", "divergence_gradients", "student_entropy"]


def divergence(call: Call) -> Any:
    """Return the divergence, reduced or per row."""
    rows = _Rows(call)
    return reduced(rows.a * rows.loss, call.options, rows.divisor, rows.shape)


def student_entropy(call: Call) -> Array:
    """Return the student's entropy per row; 0 for rows with weight 0."""
    rows = _Rows(call)
    return np.where(rows.a == 0, 0.0, rows.entropy).reshape(rows.shape)


def divergence_gradients(call: Call, upstream: Any = 1.0) -> dict[str, Array]:
    """Return the gradients by argument: "logits", or "input", "linear_weight" and "linear_bias" (given or not)."""
    rows = _Rows(call)
    scale = scaled(rows.a, upstream, call.options, rows.divisor)
    return gradients(call.source, scale[:, None] * rows.derivative * rows.slope)


class _Rows:
    """N rows: weight `a` and divergence `loss`, (N,); `derivative` dl/dx and `slope` dx/dz, (N, V)."""

    def __init__(self, call: Call) -> None:
        source, target, options = call.source, call.target, call.options
        assert isinstance(target, Dense | TopK)
        z = raw(source)
        self.shape = z.shape[:-1]
        weight = np.ones(self.shape) if options.sample_weight is None else float64(options.sample_weight)
        if options.shift:  # row t has the weight t + shift
            kept, weight = weight[..., options.shift :], np.zeros(self.shape)
            weight[..., : kept.shape[-1]] = kept
        self.a = weight.reshape(-1)
        self.divisor = self.a.sum() if options.normalizer is None else float(options.normalizer)
        dead = self.a == 0

        def active(z: Array, activation: Activation) -> tuple[Array, Array]:
            """Return x and dx/dz, (N, V); those of 0 in dead rows, even if these are NaN."""
            return activated(np.where(dead[:, None], 0.0, z.reshape(len(dead), z.shape[-1])), activation)

        x, self.slope = active(z, call.activation)
        log_p = _log_softmax(x)
        self.entropy = -_kl(np.exp(log_p), np.zeros_like(log_p), -log_p)
        if isinstance(target, TopK):
            self.loss, self.derivative = _from_top_k(log_p, target, self.shape, dead, options.kind)
        else:
            log_q = _log_softmax(active(raw(target.source), target.activation)[0])
            self.loss, self.derivative = _between(log_p, log_q, options.kind, options.beta)


def _between(log_p: Array, log_q: Array, kind: str, beta: float) -> tuple[Array, Array]:
    """Return the divergence (N,) of full distributions and its derivative (N, V) with respect to x."""
    p, q = np.exp(log_p), np.exp(log_q)
    if kind == "tv":
        sign = np.sign(p - q)
        return np.abs(p - q).sum(-1) / 2, p * (sign - (p * sign).sum(-1, keepdims=True)) / 2
    if beta == 0:
        return _kl(q, log_q, log_p), p - q
    if beta == 1:
        reverse = _kl(p, log_p, log_q)
        return reverse, _times(p, log_p, log_q, reverse)
    log_m = np.logaddexp(np.log1p(-beta) + log_p, np.log(beta) + log_q)
    log_m = np.where(log_p == log_q, log_p, log_m)  # without rounding
    to_mixture = _kl(p, log_p, log_m)
    loss = beta * _kl(q, log_q, log_m) + (1 - beta) * to_mixture
    return loss, (1 - beta) * _times(p, log_p, log_m, to_mixture)


def _kl(p: Array, log_p: Array, log_q: Array) -> Array:
    """Return sum_c p (log p - log q), (N,); classes with p = 0 contribute 0."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1))


def _times(p: Array, log_p: Array, log_q: Array, mean: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return np.where(p == 0, 0.0, p * (log_p - log_q - mean[:, None]))


def _from_top_k(log_p: Array, teacher: TopK, shape: tuple[int, ...], dead: Array, kind: str) -> tuple[Array, Array]:
    """Return the divergence (N,) from the K classes of each row, and its derivative (N, V)."""
    vocabulary = log_p.shape[-1]
    ids = np.asarray(teacher.ids, np.int64).reshape(len(log_p), teacher.ids.shape[-1])
    log_q = float64(teacher.log_probs).reshape(ids.shape)
    each_row, dtype = (*shape, ids.shape[1]), dtype_name(teacher.log_probs)
    used = ~dead.reshape(shape)
    check_top_k(ids.reshape(each_row), log_q.reshape(each_row), used, teacher.tail, dtype, vocabulary)
    log_q = np.where(dead[:, None], -np.inf, log_q)
    loss, derivative = np.zeros(len(log_p)), np.exp(log_p)
    tolerance = mass_tolerance(dtype)
    for row in np.flatnonzero(~dead):
        known = log_q[row] != -np.inf
        chosen, each = ids[row, known], log_q[row, known]
        q = np.exp(each)
        p = np.exp(log_p[row])
        if teacher.tail == "renormalize":
            each = each - np.log(q.sum())
            q = np.exp(each)
        left = np.ones(vocabulary, bool)
        left[chosen] = False
        mass = max(1 - q.sum(), 0.0) if teacher.tail == "bucket" else 0.0
        log_p_left = np.logaddexp.reduce(log_p[row, left], initial=-np.inf)
        if log_p_left == -np.inf and mass <= tolerance:
            mass = 0.0  # the rest is rounding: no other class can have it
        if kind == "tv":
            apart = p[left].sum() - mass
            sign = np.full(vocabulary, np.sign(apart))
            sign[chosen] = np.sign(p[chosen] - q)
            loss[row] = (np.abs(p[chosen] - q).sum() + abs(apart)) / 2
            derivative[row] = p * (sign - (p * sign).sum()) / 2
            continue
        loss[row] = (q * (each - log_p[row, chosen])).sum()
        derivative[row] *= q.sum() + mass  # 1 up to rounding in a bucket
        derivative[row, chosen] -= q
        if mass:
            loss[row] += mass * (np.log(mass) - log_p_left)
            derivative[row, left] -= mass * np.exp(log_p[row, left] - log_p_left)
    return loss, derivative


def _log_softmax(x: Array) -> Array:
    largest = x.max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.asarray(x - largest - np.log(np.exp(x - largest).sum(-1, keepdims=True)))
