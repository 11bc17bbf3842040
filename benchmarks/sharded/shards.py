"""The tensors of one rank, and the truth, which is computed from the whole classifier.

Hidden states and targets are the same on all ranks. The classifier is sharded by rows as by DTensor's Shard. Every rank
computes the truth in float32 from the gathered shards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.gpu.truth import Truth, linear_truth, relative_error

__all__ = ["RankShards"]

_SEED = 20240229


class RankShards:
    """The inputs of `benchmarks.problems.LinearProblem`, with the classifier sharded over all processes."""

    def __init__(self, case: Case) -> None:
        """Draw replicated tensors on the first rank and broadcast them; draw each shard on its rank."""
        self.group: Any = dist.group.WORLD
        rank, device, dtype = dist.get_rank(), case.device, getattr(torch, case.dtype)
        generator = torch.Generator(device).manual_seed(_SEED + rank)
        step = -(-case.vocabulary // case.ranks)
        self._stops = [min((each + 1) * step, case.vocabulary) for each in range(case.ranks)]
        self.first = min(rank * step, case.vocabulary)
        self.input = torch.empty(case.tokens, case.hidden, dtype=dtype, device=device).normal_(generator=generator)
        self.target = torch.randint(case.vocabulary, (case.tokens,), generator=generator, device=device)
        for same in (self.input, self.target):
            dist.broadcast(same, 0)
        rows = self._stops[rank] - self.first
        self.weight = torch.empty(rows, case.hidden, dtype=dtype, device=device)
        self.weight.normal_(std=case.hidden**-0.5, generator=generator)
        step = -(-case.tokens // case.ranks)
        self._mine = slice(min(rank * step, case.tokens), min((rank + 1) * step, case.tokens))
        self.tokens = self.input[self._mine].clone()
        for leaf in (self.input, self.tokens, self.weight):
            leaf.requires_grad_()
        self.truth = self._truth()

    def clear(self) -> None:
        """Drop the gradients of an earlier call."""
        self.input.grad = self.tokens.grad = self.weight.grad = None

    def errors(self, loss: float) -> dict[str, float]:
        """Return the absolute error of the loss and the relative errors of this rank's gradients, as record fields."""
        true = self.truth.input
        assert true is not None
        of_input = (self.input.grad, true) if self.tokens.grad is None else (self.tokens.grad, true[self._mine])
        return {
            "loss_error": abs(loss - float(self.truth.rows.double().mean())),
            "input_gradient_error": relative_error(*of_input),
            "weight_gradient_error": relative_error(self.weight.grad, self.truth.weight),
        }

    def _truth(self) -> Truth:
        """Return the loss, the gradient of all hidden states, and that of this rank's rows."""
        whole = linear_truth(_Whole(self.input, self._gathered(), self.target))
        assert whole.weight is not None
        mine = whole.weight[self.first : self.first + len(self.weight)].clone()
        return Truth(whole.rows, whole.input, mine)

    @torch.no_grad()
    def _gathered(self) -> Tensor:
        parts, first = [], 0
        for rank, stop in enumerate(self._stops):
            part = torch.empty(stop - first, self.weight.shape[1], dtype=self.weight.dtype, device=self.weight.device)
            if rank == dist.get_rank():
                part.copy_(self.weight)
            dist.broadcast(part, rank)
            parts.append(part)
            first = stop
        return torch.cat(parts).requires_grad_()


class _Whole:
    """The problem of one process."""

    def __init__(self, input: Tensor, weight: Tensor, target: Tensor) -> None:
        self.input, self.weight, self.target = input, weight, target
        self.upstream: Tensor | None = None
