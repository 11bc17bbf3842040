"""The divergences of the reference, from log-probabilities. They follow the formulas of `xent.divergence`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xent.core.call import TopK, tolerance
from xent.core.validate import check_top_k

__all__ = ["Array", "between", "expectation", "from_top_k"]

Array = NDArray[Any]


def expectation(weights: Array, quantity: Array) -> Array:
    """Sum weights * quantity over classes; a weight of 0 contributes 0, even if the quantity is infinite or NaN."""
    return np.asarray(np.where(weights == 0, 0.0, weights * quantity).sum(-1))


def between(log_p: Array, log_q: Array, kind: str, beta: float) -> tuple[Array, Array]:
    """Return the divergence (N,) of full distributions and its derivative (N, V) with respect to x."""
    p, q = np.exp(log_p), np.exp(log_q)
    if kind == "tv":
        return np.abs(p - q).sum(-1) / 2, _centred(p, np.sign(p - q) / 2)
    if beta == 0:
        return expectation(q, log_q - log_p), p - q
    if beta == 1:
        return expectation(p, log_p - log_q), _centred(p, log_p - log_q)
    # The factors are not added as logarithms, whose rounding would be the same for all classes.
    top = np.maximum(log_p, log_q)
    peak = np.where(top == -np.inf, 0.0, top)
    log_m = peak + np.log((1 - beta) * np.exp(log_p - peak) + beta * np.exp(log_q - peak))
    log_m = np.where(log_p == log_q, log_p, log_m)  # without rounding
    loss = beta * expectation(q, log_q - log_m) + (1 - beta) * expectation(p, log_p - log_m)
    return loss, (1 - beta) * _centred(p, log_p - log_m)


def _centred(p: Array, quantity: Array) -> Array:
    """Return p_c (quantity_c - sum_k p_k quantity_k), 0 where p_c is 0."""
    return np.where(p == 0, 0.0, p * (quantity - expectation(p, quantity)[..., None]))


def from_top_k(log_p: Array, teacher: TopK, shape: tuple[int, ...], excluded: Array, kind: str) -> tuple[Array, Array]:
    """Return the divergence (N,) from the K classes of each row, and its derivative (N, V)."""
    vocabulary = log_p.shape[-1]
    ids, log_q = np.asarray(teacher.ids, np.int64), np.asarray(teacher.log_probs, np.float64)
    check_top_k(ids, log_q, ~excluded.reshape(shape), teacher, vocabulary)
    ids, log_q = ids.reshape(len(log_p), ids.shape[-1]), log_q.reshape(len(log_p), ids.shape[-1])
    loss, derivative = np.zeros(len(log_p)), np.zeros_like(log_p)
    for row in np.flatnonzero(~excluded):
        known = log_q[row] != -np.inf
        chosen, each, p = ids[row, known], log_q[row, known], np.exp(log_p[row])
        if teacher.tail == "renormalize":
            each = each - np.log(np.exp(each).sum())
        q, left = np.exp(each), np.ones(vocabulary, bool)
        left[chosen] = False
        mass = max(1 - q.sum(), 0.0) if teacher.tail == "bucket" else 0.0
        log_p_left = np.logaddexp.reduce(log_p[row, left], initial=-np.inf)
        if log_p_left == -np.inf and mass <= tolerance(teacher):
            mass = 0.0  # the rest is rounding: no other class can have it
        if kind == "tv":
            apart = p[left].sum() - mass
            sign = np.full(vocabulary, np.sign(apart))
            sign[chosen] = np.sign(p[chosen] - q)
            loss[row], derivative[row] = (np.abs(p[chosen] - q).sum() + abs(apart)) / 2, _centred(p, sign / 2)
            continue
        loss[row] = (q * (each - log_p[row, chosen])).sum()
        derivative[row] = p * (q.sum() + mass)  # 1 up to rounding in a bucket
        derivative[row, chosen] -= q
        if mass:
            loss[row] += mass * (np.log(mass) - log_p_left)
            derivative[row, left] -= mass * np.exp(log_p[row, left] - log_p_left)
    return loss, derivative
