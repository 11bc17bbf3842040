"""The work of the measuring process on a GPU: open a case, prepare contenders, run their turns.

All contenders of a case share its inputs. Everything is warmed up before it is measured: kernels are compiled,
libraries have handles and workspaces, and each turn starts with an untimed call, so that the allocator has the memory
that the contender needs.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.contenders import Contender, LossFunction, find_contender
from benchmarks.devices import Device
from benchmarks.gpu.clock import device_seconds, host_seconds, loop_seconds
from benchmarks.gpu.truth import Truth, compute_truth
from benchmarks.problems import Problem, make_problem

__all__ = ["Session"]

# The share of the device's memory, because two processes may use the device.
_MOST_RESERVED = 0.4
_HOST_SECONDS, _HOST_CALLS = 0.1, (4, 30)


@dataclass
class _Prepared:
    contender: Contender
    loss: LossFunction
    problem: Problem
    host: float = 0.0

    def set_up(self) -> tuple[Tensor, ...]:
        """Return fresh arguments."""
        return self.problem.set_up(self.contender.in_place)

    def call(self, arguments: tuple[Tensor, ...]) -> Tensor | None:
        """Make one call with its backward pass; a floor returns nothing."""
        if self.contender.kind == "floor":
            with torch.no_grad():
                self.loss(*arguments)
            return None
        return self.problem.call(self.loss, arguments)

    def iteration(self, arguments: tuple[Tensor, ...]) -> None:
        """Make one call as an iteration of a loop: drop gradients, reuse the arguments, also overwritten logits."""
        if self.contender.in_place:
            arguments = self.problem.set_up(in_place=True, fresh=False)
        else:
            self.problem.clear()
        self.call(arguments)


class Session:
    """One case on one device."""

    def __init__(self, case: Case, device: Device) -> None:
        """Create the inputs and, if the case needs it, the truth."""
        gc.unfreeze()
        torch.compiler.reset()  # graphs of earlier cases count towards the recompilation limit
        self.case = case
        self.device = device
        self.prepared: dict[str, _Prepared] = {}
        self.problem = make_problem(case)
        self.truth: Truth | None = compute_truth(self.problem) if case.accuracy else None
        self.free()

    def prepare(self, name: str) -> dict[str, Any]:
        """Warm up one contender; return the reply of `benchmarks.protocol.Prepare`."""
        contender = find_contender(self.case.function, name)
        prepared = _Prepared(contender, contender.make(self.case), self.problem)
        start = self.device.now()
        prepared.call(prepared.set_up())
        self.device.wait()
        reply: dict[str, Any] = {"first_call_seconds": self.device.now() - start}
        prepared.call(prepared.set_up())
        if contender.kind != "floor":
            reply |= self._peak_and_errors(prepared)
        self.prepared[name] = prepared
        self.free()
        arguments = prepared.set_up()
        call_seconds = loop_seconds(self.device, lambda: prepared.iteration(arguments), 2)
        fewest, most = _HOST_CALLS
        calls = min(max(math.ceil(_HOST_SECONDS / call_seconds), fewest), most)
        prepared.host = host_seconds(self.device, lambda: prepared.iteration(arguments), calls)
        start = self.device.now()
        self.turn(name, 1, 1)
        seconds = self.device.now() - start
        return reply | {"host": prepared.host, "call_seconds": call_seconds, "turn_seconds": seconds}

    def _peak_and_errors(self, prepared: _Prepared) -> dict[str, Any]:
        arguments = prepared.set_up()
        losses: list[Tensor] = []

        def call() -> None:
            losses.extend(each for each in [prepared.call(arguments)] if each is not None)

        reply: dict[str, Any] = {"peak_bytes": self.device.peak(call)}
        reply["loss"] = losses[0].double().mean().item()
        if self.truth is not None:
            reply |= self.truth.errors(prepared.problem, losses[0])
        return reply

    def turn(self, name: str, iterations: int, calls: int) -> dict[str, float]:
        """Run one contender: an untimed call, a loop, and calls timed on the device. Return the seconds of one call."""
        prepared = self.prepared[name]
        if self.case.device == "cuda":
            _keep_memory_free()
        arguments = prepared.set_up()
        prepared.iteration(arguments)
        loop = loop_seconds(self.device, lambda: prepared.iteration(arguments), iterations)
        seconds = device_seconds(self.device, prepared.call, prepared.set_up, calls, prepared.host)
        prepared.problem.clear()
        return {"loop": loop, "seconds": seconds}

    def free(self) -> None:
        """Drop the gradients of the last call, and release unused memory of the device.

        Objects that exist now are frozen for the garbage collector until the next case: there is a collection before
        each turn, and with the frameworks loaded a full one takes longer than most calls.
        """
        self.problem.clear()
        gc.collect()
        gc.freeze()
        if self.case.device == "cuda":
            torch.cuda.empty_cache()


def _keep_memory_free() -> None:
    """Empty the allocator's cache before it is so large that the next contender would do so during a timed call."""
    total = torch.cuda.get_device_properties().total_memory
    if torch.cuda.memory_reserved() > _MOST_RESERVED * total:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
