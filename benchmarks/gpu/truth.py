"""The truth: loss and whole gradients in float32 from the inputs of a case, and the errors of contenders against it.

It is computed over blocks of rows, so that the float32 logits are not stored, with matrix products without TF32. The
gradient of a logits case is computed again for each comparison, because it would take as much memory as two inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.cases import IGNORE_INDEX
from benchmarks.gpu.definitions import divergence, log_probabilities
from benchmarks.problems import DivergenceProblem, LinearProblem, LogitsProblem, Problem

__all__ = ["Linear", "Truth", "compute_truth", "linear_truth", "relative_error"]

_BLOCK_ELEMENTS = 2**28
_COMPARED_ROWS = 4096


class _Rows(Protocol):
    """Rows with targets (tokens,) and, unless their losses are averaged, upstream gradients."""

    target: Tensor
    upstream: Tensor | None


class Linear(_Rows, Protocol):
    """Hidden states and a classifier; gradients are computed for those that require one."""

    input: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Truth:
    """`rows` are the log-probabilities, or the losses that are averaged; float32 gradients only for linear cases."""

    rows: Tensor
    input: Tensor | None = None
    weight: Tensor | None = None

    def errors(self, problem: Problem, result: Tensor) -> dict[str, float]:
        """Return the absolute error of the loss, and the relative errors (Frobenius norm) of the gradients.

        For log-probabilities the first is the largest absolute error. The keys are fields of
        `benchmarks.records.Record`.
        """
        if problem.case.function.endswith("log-probabilities"):
            error = float((result.double().flatten() - self.rows).abs().max())
        else:
            error = abs(float(result.double().mean()) - _mean(self.rows, problem))
        found = {"loss_error": error}
        if isinstance(problem, LogitsProblem):
            if problem.gradient is not None:
                found["input_gradient_error"] = _logits_error(problem)
        elif isinstance(problem, LinearProblem):
            pairs = (
                ("input_gradient_error", problem.input.grad, self.input),
                ("weight_gradient_error", problem.weight.grad, self.weight),
            )
            found |= {name: relative_error(grad, true) for name, grad, true in pairs if None not in (grad, true)}
        return found


@torch.no_grad()
def compute_truth(problem: Problem) -> Truth:
    """Compute the loss of the problem, and the gradients of a linear one that are required."""
    if isinstance(problem, LinearProblem):
        return linear_truth(problem)
    assert isinstance(problem, LogitsProblem)
    with _full_precision():
        return Truth(torch.cat([_gradient(block, problem, rows)[0] for rows, block in _blocks(problem.template)]))


@torch.no_grad()
def linear_truth(problem: Linear) -> Truth:
    """Compute the loss of a linear problem, and the gradients that are required."""
    with _full_precision():
        return _linear_truth(problem)


def _linear_truth(problem: Linear) -> Truth:
    weight = problem.weight.float()
    input_gradient = torch.zeros_like(problem.input, dtype=torch.float32) if problem.input.requires_grad else None
    weight_gradient = torch.zeros_like(weight) if problem.weight.requires_grad else None
    losses = []
    for rows in _row_blocks(len(problem.input), len(weight)):
        hidden = problem.input[rows].float()
        loss, gradient = _gradient(hidden @ weight.T, problem, rows)
        losses.append(loss)
        if input_gradient is not None:
            input_gradient[rows] = gradient @ weight
        if weight_gradient is not None:
            weight_gradient.addmm_(gradient.T, hidden)
    return Truth(torch.cat(losses), input_gradient, weight_gradient)


def _gradient(logits: Tensor, problem: _Rows, rows: slice) -> tuple[Tensor, Tensor]:
    """Return (results (r,), gradient (r, V)) for float32 logits (r, V) of these rows."""
    upstream = problem.upstream
    several = upstream is not None and upstream.dim() == 2
    if not several and not isinstance(problem, DivergenceProblem):
        return _softmax_gradient(logits, problem, rows)
    with torch.enable_grad():
        leaf = logits.requires_grad_()
        if isinstance(problem, DivergenceProblem):
            found = divergence(leaf, problem, rows)
            total = found.sum() / len(problem.input)
        else:
            assert upstream is not None
            found, entropy = log_probabilities(leaf, problem.target[rows])
            total = (torch.stack([found, entropy]) * upstream[:, rows]).sum()
        (gradient,) = torch.autograd.grad(total, leaf)
    return found.detach(), gradient


def _softmax_gradient(logits: Tensor, problem: _Rows, rows: slice) -> tuple[Tensor, Tensor]:
    """Return (losses (r,), 0 for ignored rows; gradient (r, V)) for float32 logits (r, V) of these rows."""
    target = problem.target[rows]
    counts = target != IGNORE_INDEX
    index = torch.where(counts, target, 0)[:, None]
    lse = torch.logsumexp(logits, 1, keepdim=True)
    loss = torch.where(counts, (lse - logits.gather(1, index))[:, 0], 0.0)
    gradient = logits.sub_(lse).exp_()
    gradient.scatter_add_(1, index, gradient.new_full((1, 1), -1.0).expand(index.shape))
    scale = problem.upstream[rows] if problem.upstream is not None else 1.0 / _counted(problem)
    return loss, gradient.mul_(torch.where(counts, scale, 0.0)[:, None])


def _logits_error(problem: LogitsProblem) -> float:
    difference, size = 0.0, 0.0
    with torch.no_grad():
        for rows, block in _blocks(problem.template):
            true = _gradient(block, problem, rows)[1]
            size += float(true.norm()) ** 2
            difference += float(true.sub_(problem.gradient[rows]).norm()) ** 2
    return float((difference / size) ** 0.5)


@torch.no_grad()
def relative_error(found: Tensor | None, true: Tensor | None) -> float:
    """Return how far a gradient is from the true one, in the Frobenius norm."""
    assert found is not None
    assert true is not None
    difference = 0.0
    for start in range(0, len(true), _COMPARED_ROWS):
        rows = slice(start, start + _COMPARED_ROWS)
        difference += float((found[rows].float() - true[rows]).norm()) ** 2
    return float(difference**0.5 / true.norm())


def _counted(problem: _Rows) -> Tensor:
    return (problem.target != IGNORE_INDEX).sum()


def _mean(losses: Tensor, problem: _Rows) -> float:
    """Average over the rows that count; over all of them if the rows' losses are what is returned."""
    count = len(losses) if problem.upstream is not None else int(_counted(problem))
    return float(losses.double().sum() / count)


def _row_blocks(rows: int, vocabulary: int) -> Iterator[slice]:
    step = max(_BLOCK_ELEMENTS // vocabulary, 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows in float32, each a copy that may be overwritten."""
    for rows in _row_blocks(*logits.shape):
        yield rows, logits[rows].to(torch.float32, copy=True)


@contextmanager
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
