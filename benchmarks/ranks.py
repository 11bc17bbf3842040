"""One rank of several: its device, whose clocks start at the same time as all others', and its shard of a problem.

Otherwise the waiting time in the first collective would count. Hidden states and targets are the same on all ranks. The
classifier is sharded by rows as by DTensor's Shard. Every rank computes the truth from the gathered shards.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.devices import DEVICES, Device
from benchmarks.problems import Problem
from benchmarks.truth import Truth, compute_truth

__all__ = ["Ranks", "Shards"]

_PATIENCE = timedelta(seconds=120)
_SEED = 20240229


class Ranks(Device):
    """A device of this rank that synchronises with all ranks; see `benchmarks.devices.Device`."""

    def __init__(self, kind: str, ranks: int, rank: int, meeting: str) -> None:
        """Join the process group, with one GPU per rank; without a meeting there is one already."""
        own: dict[str, Any] = {}
        if kind == "cuda" and meeting:
            if torch.cuda.device_count() < ranks:
                raise RuntimeError(f"{ranks} ranks want a GPU each, and PyTorch sees {torch.cuda.device_count()}")
            torch.cuda.set_device(rank)
            own["device_id"] = torch.device("cuda", rank)
        if meeting:
            where = {"init_method": f"file://{meeting}", "rank": rank, "world_size": ranks, "timeout": _PATIENCE}
            dist.init_process_group("nccl" if kind == "cuda" else "gloo", **where, **own)
        self._kind, self._device = kind, DEVICES[kind]()
        self._one = torch.zeros(1, device=kind)
        self.mark, self.elapsed = self._device.mark, self._device.elapsed  # type: ignore[method-assign]

    def wait(self) -> None:
        """Wait until the devices of all ranks have finished their work."""
        self._device.wait()
        dist.all_reduce(self._one)
        self._device.wait()

    def peak(self, call: Callable[[], None]) -> int | None:
        """Make the call; return this rank's peak."""
        return self._device.peak(call)

    def lead(self, seconds: float) -> None:
        """Give the device work, followed by a barrier of all ranks' devices."""
        self._device.lead(seconds)
        dist.all_reduce(self._one)

    def most(self, value: float) -> float:
        """Return the largest value of all ranks."""
        values = torch.tensor([value], dtype=torch.float64, device=self._kind)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return float(values)

    def facts(self) -> dict[str, Any]:
        """Return the process group."""
        return {"ranks": dist.get_world_size(), "process_group": dist.get_backend()}


class Shards(Problem):
    """The inputs of `benchmarks.problems.LinearProblem`, with the classifier sharded over all processes."""

    def __init__(self, case: Case) -> None:
        """Draw replicated tensors on the first rank and broadcast them; draw each shard on its rank."""
        super().__init__(case)
        self.group: Any = dist.group.WORLD
        rank = dist.get_rank()
        self._generator.manual_seed(_SEED + rank)
        step = -(-case.vocabulary // case.ranks)
        self._sizes = [max(0, min(step, case.vocabulary - each * step)) for each in range(case.ranks)]
        self.first = min(rank * step, case.vocabulary)
        self.input = self._normal(case.tokens, case.hidden)
        self._draw_targets()
        for same in (self.input, self.target):
            dist.broadcast(same, 0)
        self.weight = self._normal(self._sizes[rank], case.hidden, std=case.hidden**-0.5)
        if case.teacher:
            self.teacher = self._normal(case.tokens, case.hidden), torch.empty_like(self.weight)
            dist.broadcast(self.teacher[0], 0)
            self.teacher[1].normal_(std=case.hidden**-0.5, generator=self._generator)
        step = -(-case.tokens // case.ranks)
        self._mine = slice(min(rank * step, case.tokens), min((rank + 1) * step, case.tokens))
        self.tokens = self.input[self._mine].clone()
        for leaf in (self.input, self.tokens, self.weight):
            leaf.requires_grad_()

    def set_up(self, in_place: bool = False, fresh: bool = True) -> tuple[Any, ...]:
        """Return the argument of a step, which is this object, without gradients of an earlier call."""
        self.clear()
        return (self,)

    def clear(self) -> None:
        """Drop the gradients of an earlier call."""
        self.input.grad = self.tokens.grad = self.weight.grad = None

    def call(self, step: Callable[[Any], Tensor], arguments: tuple[Any, ...]) -> Tensor:
        """Run the step, which has its backward pass."""
        return step(*arguments)

    def errors(self, truth: Truth, result: Tensor) -> dict[str, float]:
        """Return the absolute error of the loss and the relative errors of this rank's gradients, as record fields."""
        if self.tokens.grad is None:
            return truth.errors(self, result)
        assert truth.input is not None
        own = copy(self)
        own.input = self.tokens
        return replace(truth, input=truth.input[self._mine]).errors(own, result)

    def truth(self) -> Truth:
        """Return the loss, the gradient of all hidden states, and that of this rank's rows."""
        whole = copy(self)
        whole.weight = self._gathered(self.weight).requires_grad_()
        if self.case.teacher:
            whole.teacher = self.teacher[0], self._gathered(self.teacher[1])
        truth = compute_truth(whole)
        assert truth.weight is not None
        return replace(truth, weight=truth.weight[self.first : self.first + len(self.weight)].clone())

    def _gathered(self, shard: Tensor) -> Tensor:
        parts = [shard.new_empty(size, self.case.hidden) for size in self._sizes]
        parts[dist.get_rank()] = shard.detach().clone()
        for rank, part in enumerate(parts):
            dist.broadcast(part, rank)
        return torch.cat(parts)
