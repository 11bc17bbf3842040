"""The unfused divergence for the checks, as a careful training script computes it with PyTorch's operations."""

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["unfused_divergence"]


def unfused_divergence(
    logits: Tensor,
    *,
    teacher: Tensor | None = None,
    ids: Tensor | None = None,
    log_probs: Tensor | None = None,
    tail: str = "",
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_scale: float = 1.0,
    reduction: str = "mean",
    sample_weight: Tensor | None = None,
    normalizer: Any = None,
) -> Tensor:
    """See `xent.backends.protocol.Harness.unfused_divergence`."""
    log_p = _log_probs(logits, softcap, logit_scale, temperature)
    if teacher is not None:
        rows = _between(log_p, _log_probs(teacher, teacher_softcap, teacher_scale, temperature), beta)
    else:
        assert ids is not None
        assert log_probs is not None
        rows = _from_top_k(log_p, ids.long(), log_probs.to(log_p.dtype), tail)
    a = torch.ones_like(rows) if sample_weight is None else sample_weight.to(rows.dtype)
    rows = torch.where(a == 0, 0, a * rows)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    divisor = a.sum() if normalizer is None else normalizer
    return rows.sum() / divisor if float(divisor) else rows.sum() * 0


def _log_probs(z: Tensor, softcap: float | None, scale: float, temperature: float) -> Tensor:
    x = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    return torch.log_softmax(x / temperature, -1)


def _between(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if beta == 1:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    forward = (log_q.exp() * (log_q - log_m)).sum(-1)
    return beta * forward + (1 - beta) * (log_p.exp() * (log_p - log_m)).sum(-1)


def _from_top_k(log_p: Tensor, ids: Tensor, log_q: Tensor, tail: str) -> Tensor:
    known = log_q != -torch.inf
    if tail == "renormalize":
        log_q = log_q - log_q.logsumexp(-1, keepdim=True)
    q = log_q.exp()
    safe = torch.where(known, log_q, 0)
    rows = (q * (safe - log_p.gather(-1, ids))).sum(-1)
    if tail != "bucket":
        return rows
    # Sum over the other classes directly: 1 minus the sum of the K classes could round to 0 or below.
    counts = torch.zeros_like(log_p).scatter_add(-1, ids, known.to(log_p.dtype))
    p_left = torch.where(counts > 0, 0, log_p.exp()).sum(-1)
    mass = (1 - q.sum(-1)).clamp(min=0)
    some = (mass > 0) & (p_left > 0)
    return rows + torch.where(some, mass * (mass.clamp(min=1e-30).log() - torch.where(some, p_left, 1).log()), 0)
