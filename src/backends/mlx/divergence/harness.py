"""The unfused divergence for the checks, as a careful training script computes it with MLX's operations."""

import math
from typing import Any

import mlx.core as mx

__all__ = ["unfused_divergence"]


def unfused_divergence(
    logits: mx.array,
    *,
    teacher: mx.array | None = None,
    ids: mx.array | None = None,
    log_probs: mx.array | None = None,
    tail: str = "",
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_scale: float = 1.0,
    reduction: str = "mean",
    sample_weight: mx.array | None = None,
    normalizer: Any = None,
) -> mx.array:
    """See `xent.backends.protocol.Harness.unfused_divergence`."""
    if not logits.size:  # on NVIDIA GPUs some operations of MLX crash for empty arrays
        found = logits.sum().astype(mx.float64 if logits.dtype == mx.float64 else mx.float32)
        return logits.sum(-1).astype(found.dtype) if reduction == "none" else found
    log_p = _log_probs(logits, softcap, logit_scale, temperature)
    if teacher is not None:
        rows = _between(log_p, _log_probs(teacher, teacher_softcap, teacher_scale, temperature), beta)
    else:
        assert ids is not None
        assert log_probs is not None
        rows = _from_top_k(log_p, ids, log_probs.astype(log_p.dtype), tail)
    a = mx.ones_like(rows) if sample_weight is None else sample_weight.astype(rows.dtype)
    rows = mx.where(a == 0, 0, a * rows)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    divisor = a.sum() if normalizer is None else normalizer
    return rows.sum() / divisor if float(divisor) else rows.sum() * 0


def _log_probs(z: mx.array, softcap: float | None, scale: float, temperature: float) -> mx.array:
    x = z.astype(mx.float64 if z.dtype == mx.float64 else mx.float32) * scale
    if softcap is not None:
        x = softcap * mx.tanh(x / softcap)
    x = x / temperature
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


def _between(log_p: mx.array, log_q: mx.array, beta: float) -> mx.array:
    if beta == 0:
        return (mx.exp(log_q) * (log_q - log_p)).sum(-1)
    if beta == 1:
        return (mx.exp(log_p) * (log_p - log_q)).sum(-1)
    log_m = mx.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    forward = (mx.exp(log_q) * (log_q - log_m)).sum(-1)
    return beta * forward + (1 - beta) * (mx.exp(log_p) * (log_p - log_m)).sum(-1)


def _from_top_k(log_p: mx.array, ids: mx.array, log_q: mx.array, tail: str) -> mx.array:
    known = log_q != -mx.inf
    if tail == "renormalize":
        log_q = log_q - mx.logsumexp(log_q, axis=-1, keepdims=True)
    q = mx.exp(log_q)
    rows = (q * (mx.where(known, log_q, 0) - mx.take_along_axis(log_p, ids, -1))).sum(-1)
    if tail != "bucket":
        return rows
    counts = mx.zeros_like(log_p)
    classes = mx.arange(log_p.shape[-1])
    for k in range(ids.shape[-1]):
        counts = counts + ((ids[..., k : k + 1] == classes) & known[..., k : k + 1])
    p_left = mx.where(counts > 0, 0, mx.exp(log_p)).sum(-1)
    mass = mx.maximum(1 - q.sum(-1), 0)
    some = (mass > 0) & (p_left > 0)
    return rows + mx.where(some, mass * (mx.log(mx.maximum(mass, 1e-30)) - mx.log(mx.where(some, p_left, 1))), 0)
