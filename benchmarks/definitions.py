"""Log-probabilities and divergences by their definitions, from stored logits, with PyTorch's autograd."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["divergence", "log_probabilities"]


def log_probabilities(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target (r,) and the entropy (r,) of logits (r, V), at least in float32."""
    log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def divergence(logits: Tensor, teacher: tuple[Tensor, ...], beta: float) -> Tensor:
    """Return the divergence (r,) of logits (r, V) from a teacher: its logits (r, V), or the ids and log-probabilities.

    Of K stored classes (r, K) it is KL(q || p) over them and the rest as one class.
    """
    log_p = logits.log_softmax(-1)
    if len(teacher) == 2:
        ids, log_q = teacher
        log_p = log_p.gather(1, ids)
        rest_p, rest_q = (torch.log1p(-each.exp().sum(-1)) for each in (log_p, log_q))
        return _kl(log_q, log_p) + rest_q.exp() * (rest_q - rest_p)
    log_q = teacher[0].log_softmax(-1)
    if beta in (0, 1):
        return _kl(log_p, log_q) if beta else _kl(log_q, log_p)
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    return beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)
