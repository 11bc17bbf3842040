"""Log-probabilities and divergences by their definitions, from stored logits, with PyTorch's autograd: the truth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.problems import DivergenceProblem

__all__ = ["divergence", "divergence_of", "log_probabilities", "top_k_divergence"]


def log_probabilities(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target (r,) and the entropy (r,) of logits (r, V)."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def divergence(logits: Tensor, problem: DivergenceProblem, rows: slice) -> Tensor:
    """Return the divergence (r,) of a student's logits (r, V) from the problem's teacher."""
    first, second = problem.teacher
    if problem.top_k is not None:
        return top_k_divergence(logits, first[rows], second[rows])
    return divergence_of(logits, first[rows].float() @ second.float().T, dict(problem.case.options))


def divergence_of(logits: Tensor, teacher: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return the divergence (r,) of logits (r, V) from the teacher's (r, V), for the beta of the options."""
    beta, log_p, log_q = options.get("beta", 0.0), logits.log_softmax(-1), teacher.log_softmax(-1)
    if beta == 0:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if beta == 1:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    of_teacher = (log_q.exp() * (log_q - log_m)).sum(-1)
    return beta * of_teacher + (1 - beta) * (log_p.exp() * (log_p - log_m)).sum(-1)


def top_k_divergence(logits: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(q || p) (r,) over K classes (r, K) and the rest as one class."""
    log_p = logits.log_softmax(-1).gather(1, ids)
    rest_p, rest_q = (torch.log1p(-each.exp().sum(-1)) for each in (log_p, log_q))
    return (log_q.exp() * (log_q - log_p)).sum(-1) + rest_q.exp() * (rest_q - rest_p)
