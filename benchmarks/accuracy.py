"""Errors of each contender against float64, so that a fast but wrong implementation is noticed.

The log-sum-exp of each row is computed over blocks of the vocabulary, so that the float64 logits are not stored. The
gradients are compared on sampled rows, the same for all contenders. Imported only by the processes that measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.problems import LinearProblem

__all__ = ["Truth", "compute_truth", "gradient_errors"]

_BLOCK = 2048
_SAMPLES = 256


@dataclass(frozen=True)
class Truth:
    """The loss and sampled rows of both gradients in float64.

    `tokens` (s,) are row indices of the input, with the gradient `input_gradient` (s, hidden). `classes` (t,) are row
    indices of the weight, with the gradient `weight_gradient` (t, hidden).
    """

    loss: float
    tokens: Tensor
    input_gradient: Tensor
    classes: Tensor
    weight_gradient: Tensor

    def save(self, path: Path) -> None:
        """Write to a file that `load` reads in another process."""
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> Truth:
        """Read what `save` wrote."""
        return cls(**torch.load(path))


@torch.no_grad()
def compute_truth(problem: LinearProblem) -> Truth:
    """Compute the mean cross entropy and its gradients in float64, from the inputs in the case's own dtype."""
    rows, target = problem.input.double(), problem.target
    count, device = rows.shape[0], rows.device
    lse = torch.full((count,), -torch.inf, dtype=torch.float64, device=device)
    for block in problem.weight.split(_BLOCK):
        lse = torch.logaddexp(lse, torch.logsumexp(rows @ block.double().T, dim=1))
    nll = lse - (rows * problem.weight[target].double()).sum(dim=1)

    tokens = _spread(count, device)
    input_gradient = -problem.weight[target[tokens]].double()
    for block in problem.weight.split(_BLOCK):
        block64 = block.double()
        input_gradient += (rows[tokens] @ block64.T - lse[tokens, None]).exp() @ block64

    classes = torch.cat([target[:_SAMPLES], _spread(problem.weight.shape[0], device)]).unique()
    difference = (rows @ problem.weight[classes].double().T - lse[:, None]).exp()
    difference -= (target[:, None] == classes).double()
    return Truth(nll.mean().item(), tokens, input_gradient / count, classes, difference.T @ rows / count)


def _spread(size: int, device: torch.device) -> Tensor:
    """Return at most `_SAMPLES` distinct indices, evenly spaced over range(size)."""
    return torch.linspace(0, size - 1, min(_SAMPLES, size), device=device).long().unique()


def gradient_errors(problem: LinearProblem, truth: Truth) -> tuple[float, float]:
    """Return the relative errors, in the Frobenius norm, of the sampled rows of `input.grad` and `weight.grad`."""
    if problem.input.grad is None or problem.weight.grad is None:
        raise ValueError("both gradients must exist: call the loss function on the problem first")
    return (
        _relative(problem.input.grad[truth.tokens], truth.input_gradient),
        _relative(problem.weight.grad[truth.classes], truth.weight_gradient),
    )


def _relative(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())
