"""The truth of a case in a wider dtype, and the errors of contenders against it: a fast but wrong one is noticed.

Loss and gradients are computed by their definitions over blocks of rows, so that wide logits are not stored, with
matrix products without TF32. They are float64 on a CPU and float32 on a GPU. The gradient of a logits case is computed
again for each comparison, because it would take as much memory as two inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.cases import IGNORE_INDEX
from benchmarks.definitions import divergence, log_probabilities

__all__ = ["Truth", "compute_truth"]

_BLOCK_ELEMENTS = {"cuda": 2**28, "cpu": 2**24}
_COMPARED_ROWS = 4096


@dataclass(frozen=True)
class Truth:
    """`rows` are the log-probabilities, or the losses that are averaged; wide gradients only for linear cases."""

    rows: Tensor
    input: Tensor | None = None
    weight: Tensor | None = None

    def errors(self, problem: Any, result: Tensor) -> dict[str, float]:
        """Return the absolute error of the loss, and the relative errors (Frobenius norm) of the gradients.

        For log-probabilities the first is the largest absolute error. The keys are fields of
        `benchmarks.records.Record`.
        """
        if problem.case.function.endswith("log-probabilities"):
            error = float((result.double().flatten() - self.rows).abs().max())
        else:
            error = abs(float(result.double().mean()) - self._mean(problem))
        found = {"loss_error": error}
        if not problem.case.is_linear:
            if problem.received:
                found["input_gradient_error"] = _logits_error(problem)
            return found
        pairs = {"input": (problem.input.grad, self.input), "weight": (problem.weight.grad, self.weight)}
        for name, (gradient, true) in pairs.items():
            if gradient is not None and true is not None:
                found[f"{name}_gradient_error"] = _relative_error(gradient, true)
        return found

    def _mean(self, problem: Any) -> float:
        """Average over the rows that count; over all of them if the rows' losses are what is returned."""
        count = len(self.rows) if problem.upstream is not None else int(_counted(problem))
        return float(self.rows.double().sum() / count)


@torch.no_grad()
def compute_truth(problem: Any) -> Truth:
    """Compute the results of all rows, and the gradients of a linear problem that are required."""
    wide = _wide(problem)
    with _full_precision():
        if not problem.case.is_linear:
            return Truth(torch.cat([_block(block, problem, rows)[0] for rows, block in _blocks(problem)]))
        weight = problem.weight.to(wide)
        of_input = torch.zeros_like(problem.input, dtype=wide) if problem.input.requires_grad else None
        of_weight = torch.zeros_like(weight) if problem.weight.requires_grad else None
        results = []
        for rows in _row_blocks(len(problem.input), len(weight), problem.case.device):
            hidden = problem.input[rows].to(wide)
            result, gradient = _block(hidden @ weight.T, problem, rows)
            results.append(result)
            if of_input is not None:
                of_input[rows] = gradient @ weight
            if of_weight is not None:
                of_weight.addmm_(gradient.T, hidden)
        return Truth(torch.cat(results), of_input, of_weight)


def _block(logits: Tensor, problem: Any, rows: slice) -> tuple[Tensor, Tensor]:
    """Return (results (r,), gradient (r, V)) for wide logits (r, V) of these rows."""
    case, upstream = problem.case, problem.upstream
    with torch.enable_grad():
        leaf = logits.requires_grad_()
        if hasattr(problem, "teacher"):
            first, second = problem.teacher
            stored = "top_k" in dict(case.options)
            teacher = (first[rows], second[rows]) if stored else (first[rows].to(leaf) @ second.to(leaf).T,)
            found = divergence(leaf, teacher, dict(case.options).get("beta", 0.0))
            total = found.sum() / case.tokens
        elif case.function.endswith("log-probabilities"):
            found, entropy = log_probabilities(leaf, problem.target[rows])
            total = (torch.stack([found, entropy]) * upstream[:, rows]).sum()
        else:
            target = problem.target[rows]
            found = functional.cross_entropy(leaf, target, ignore_index=IGNORE_INDEX, reduction="none")
            total = found.sum() / _counted(problem) if upstream is None else (found * upstream[rows]).sum()
        (gradient,) = torch.autograd.grad(total, leaf)
    return found.detach(), gradient


def _logits_error(problem: Any) -> float:
    difference, size = 0.0, 0.0
    for rows, block in _blocks(problem):
        true = _block(block, problem, rows)[1]
        size += float(true.norm()) ** 2
        difference += float(true.sub_(problem.received[0][rows]).norm()) ** 2
    return float((difference / size) ** 0.5)


@torch.no_grad()
def _relative_error(found: Tensor, true: Tensor) -> float:
    """Return how far a gradient is from the true one, in the Frobenius norm."""
    pairs = zip(found.split(_COMPARED_ROWS), true.split(_COMPARED_ROWS), strict=True)
    return float(sum(float((mine.to(other) - other).norm()) ** 2 for mine, other in pairs) ** 0.5 / true.norm())


def _counted(problem: Any) -> Tensor:
    return (problem.target != IGNORE_INDEX).sum()


def _wide(problem: Any) -> torch.dtype:
    return torch.float64 if problem.case.device == "cpu" else torch.float32


def _row_blocks(rows: int, vocabulary: int, device: str) -> Iterator[slice]:
    step = max(_BLOCK_ELEMENTS[device] // vocabulary, 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _blocks(problem: Any) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of the logits in the wide dtype, each a copy."""
    for rows in _row_blocks(*problem.template.shape, problem.case.device):
        yield rows, problem.template[rows].to(_wide(problem), copy=True)


@contextmanager
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
