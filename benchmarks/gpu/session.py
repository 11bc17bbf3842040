"""What the process that holds the GPU does: it opens a case, prepares contenders, and lets them take turns.

All contenders of a case share its inputs. Everything is warm before it is measured: kernels are compiled, libraries
have their handles and workspaces, and before the timed calls of a turn comes one that is not, so that the allocator
already has the memory that the contender wants.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.contenders import Contender, LossFunction, find_contender
from benchmarks.devices import DEVICES
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.truth import Truth, compute_truth
from benchmarks.problems import Problem, make_problem

__all__ = ["Session"]

_MOST_RESERVED = 0.6


@dataclass(frozen=True)
class _Prepared:
    contender: Contender
    loss: LossFunction
    problem: Problem

    def call(self, arguments: tuple[Tensor, ...]) -> Tensor | None:
        """Make one call, with its backward; a floor returns nothing."""
        if self.contender.kind == "floor":
            with torch.no_grad():
                self.loss(*arguments)
            return None
        return self.problem.call(self.loss, arguments)


class Session:
    """One case on one device."""

    def __init__(self, case: Case) -> None:
        """Make the inputs and, if the case asks for it, the truth."""
        gc.unfreeze()
        torch.compiler.reset()  # or the shapes of the cases before would count as recompilations of this one's
        self.case = case
        self.device = DEVICES[case.device]
        self.clock = Clock(case.device)
        self.problems: dict[Case, Problem] = {}
        self.prepared: dict[str, _Prepared] = {}
        problem = self._problem(case)
        self.truth: Truth | None = compute_truth(problem) if case.accuracy else None
        self.free()

    def _problem(self, case: Case) -> Problem:
        key = replace(case, contenders=(), left_out=(), goals=())
        if key not in self.problems:
            self.problems[key] = make_problem(case)
        return self.problems[key]

    def prepare(self, name: str) -> dict[str, Any]:
        """Warm one contender up, and return what `benchmarks.protocol.Prepare` promises."""
        contender = find_contender(self.case.function, name)
        case = replace(self.case, **contender.changes)
        prepared = _Prepared(contender, contender.make(case), self._problem(case))
        start = time.perf_counter()
        prepared.call(prepared.problem.set_up())
        self.device.wait()
        reply: dict[str, Any] = {"first_call_seconds": time.perf_counter() - start}
        prepared.call(prepared.problem.set_up())
        if contender.kind != "floor":
            reply |= self._peak_and_errors(prepared)
        self.prepared[name] = prepared
        self.free()
        start = time.perf_counter()
        call_seconds = self.turn(name, 1)[0]
        return reply | {"call_seconds": call_seconds, "turn_seconds": time.perf_counter() - start}

    def _peak_and_errors(self, prepared: _Prepared) -> dict[str, Any]:
        arguments = prepared.problem.set_up()
        losses: list[Tensor] = []

        def call() -> None:
            losses.extend(each for each in [prepared.call(arguments)] if each is not None)

        reply: dict[str, Any] = {"peak_bytes": self.device.peak(call)}
        reply["loss"] = losses[0].double().mean().item()
        if self.truth is not None and not prepared.contender.changes:
            reply |= self.truth.errors(prepared.problem, reply["loss"])
        return reply

    def turn(self, name: str, calls: int) -> list[float]:
        """Let one contender make a call, then `calls` more of which the seconds are returned."""
        prepared = self.prepared[name]
        if self.case.device == "cuda":
            _keep_memory_free()
        prepared.call(prepared.problem.set_up())
        seconds = self.clock.time(prepared.call, prepared.problem.set_up, calls)
        prepared.problem.clear()
        return seconds

    def free(self) -> None:
        """Drop the gradients of the last call, and give the device back what nobody uses.

        What is alive by then is frozen until the next case: with the frameworks loaded, a collection that looks at
        everything takes longer than most calls, and there is one before every turn.
        """
        for problem in self.problems.values():
            problem.clear()
        gc.collect()
        gc.freeze()
        if self.case.device == "cuda":
            torch.cuda.empty_cache()


def _keep_memory_free() -> None:
    """Empty the allocator's reserve before it is so large that the next contender would have to, while it is timed."""
    total = torch.cuda.get_device_properties().total_memory
    if torch.cuda.memory_reserved() > _MOST_RESERVED * total:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
