"""The work of a measuring process: open a case, prepare contenders, run their turns.

Everything is warmed up before it is measured: kernels are compiled, libraries have handles and workspaces, and each
turn starts with an untimed call, so that the allocator has the memory that the contender needs. On a GPU all contenders
of a case share its inputs. With several ranks all of them agree on numbers of calls, and a contender with wrong results
is not timed.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.clock import device_seconds, host_seconds, loop_seconds
from benchmarks.contenders import Contender, LossFunction, find_contender
from benchmarks.devices import DEVICES, Device
from benchmarks.facts import device_facts
from benchmarks.problems import Problem, make_problem
from benchmarks.process import NotMeasured
from benchmarks.ranks import Ranks, Shards
from benchmarks.training import TrainingProblem
from benchmarks.truth import Truth, compute_truth

__all__ = ["Session"]

# The share of the device's memory, because two processes may use the device.
_MOST_RESERVED = 0.4
_HOST_SECONDS, _HOST_CALLS = 0.1, (4, 30)
_LONG_SECONDS = 0.2
"""Calls that take longer have no host time, and need no untimed call before each turn."""
_LIMITS = {"loss_error": 0.02, "input_gradient_error": 0.05, "weight_gradient_error": 0.05}
"""The allowed error with several ranks: far above that of bfloat16, far below that of a missing collective."""


@dataclass
class _Prepared:
    contender: Contender
    loss: LossFunction
    problem: Problem
    seconds: float = 0.0
    host: float = 0.0

    def set_up(self) -> tuple[Any, ...]:
        """Return fresh arguments."""
        return self.problem.set_up(self.contender.in_place)

    def call(self, arguments: tuple[Any, ...]) -> Tensor | None:
        """Make one call with its backward pass; a floor returns nothing."""
        if self.contender.kind == "floor":
            with torch.no_grad():
                self.loss(*arguments)
            return None
        return self.problem.call(self.loss, arguments)

    def iteration(self, arguments: tuple[Any, ...]) -> None:
        """Make one call as an iteration of a loop: drop gradients, reuse the arguments, also overwritten logits."""
        if self.contender.in_place:
            arguments = self.problem.set_up(in_place=True, fresh=False)
        else:
            self.problem.clear()
        self.call(arguments)


class Session:
    """One process, with one case at a time."""

    case: Case
    device: Device
    problem: Problem
    truth: Truth | None = None

    def __init__(self, kind: str, ranks: int = 1, rank: int = 0, meeting: str = "") -> None:
        """Join the process group, if there are several ranks; the file `meeting` is their rendezvous."""
        self._kind = kind
        self._devices: dict[str, Device] = {kind: Ranks(kind, ranks, rank, meeting)} if ranks > 1 else {}
        self.prepared: dict[str, _Prepared] = {}

    def describe(self) -> dict[str, Any]:
        """Return the facts of the device and its software."""
        facts = device_facts(self._kind) | {"threads": torch.get_num_threads()}
        for device in self._devices.values():
            if isinstance(device, Ranks):
                facts |= device.facts()
                facts |= {"gpu": f"{facts['ranks']} x {facts['gpu']}"} if "gpu" in facts else {}
        return facts

    def open(self, case: Case, truth: str | None = None) -> dict[str, Any]:
        """Drop the case before, create the inputs and, if needed, the truth, which is kept in the file of this name."""
        self.prepared.clear()
        self.truth = None
        vars(self).pop("problem", None)
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()  # graphs of earlier cases count towards the recompilation limit
        self.device = self._devices.get(case.device) or DEVICES[case.device]()
        self._devices[case.device] = self.device
        make: Any = {"sharded": Shards, "training": TrainingProblem}.get(case.function, make_problem)
        self.case, self.problem = case, make(case)
        if case.accuracy and truth and Path(truth).exists():
            self.truth = Truth(**torch.load(truth))
        elif case.accuracy:
            self.truth = self.problem.truth() if isinstance(self.problem, Shards) else compute_truth(self.problem)
            if truth:
                torch.save(vars(self.truth), truth)
        self.recover()
        return {}

    def prepare(self, name: str) -> dict[str, Any]:
        """Warm up one contender, and measure peak memory, errors and host time.

        Return fields of a record, and to plan the timing "call_seconds".
        """
        contender = find_contender(self.case.function, name)
        prepared = _Prepared(contender, contender.make(self.case), self.problem)
        prepared.call(prepared.set_up())
        self.device.wait()
        reply: dict[str, Any] = {}
        if self.case.device == "cuda":
            prepared.call(prepared.set_up())
        if contender.kind != "floor":
            reply |= self._peak_and_errors(prepared)
        self.prepared[name] = prepared
        self.recover()
        arguments = prepared.set_up()
        if prepared.seconds < _LONG_SECONDS:
            prepared.seconds = self.device.most(loop_seconds(self.device, lambda: prepared.iteration(arguments), 2))
            fewest, most = _HOST_CALLS
            calls = min(max(math.ceil(_HOST_SECONDS / prepared.seconds), fewest), most)
            host = host_seconds(self.device, lambda: prepared.iteration(arguments), calls)
            prepared.host = reply["host"] = self.device.most(host)
        self.problem.clear()
        return reply | {"call_seconds": prepared.seconds}

    def _peak_and_errors(self, prepared: _Prepared) -> dict[str, Any]:
        arguments = prepared.set_up()
        losses: list[Tensor] = []

        def call() -> None:
            start = self.device.now()
            losses.append(self.problem.call(prepared.loss, arguments))
            self.device.wait()
            prepared.seconds = self.device.now() - start

        peak = self.device.peak(call)
        reply: dict[str, Any] = {"peak_bytes": None if peak is None else peak + self.problem.held_bytes}
        prepared.seconds = self.device.most(prepared.seconds)
        reply["loss"] = losses[0].double().mean().item()
        if self.truth is not None:
            errors = self.problem.errors(self.truth, losses[0])
            reply |= {name: self.device.most(error) for name, error in errors.items()}
        for name, limit in _LIMITS.items() if self.case.ranks > 1 else ():
            if not reply[name] <= limit:
                raise NotMeasured(
                    "failed", f"{name.replace('_', ' ')} of {reply[name]:.2g}, at most {limit:g} is right"
                )
        return reply

    def turn(self, name: str, iterations: int, calls: int) -> dict[str, float]:
        """Run one contender: an untimed call, a loop, and on a GPU calls timed on the device.

        Return the seconds of one call.
        """
        prepared = self.prepared[name]
        if self.case.device == "cuda":
            _keep_memory_free()
        arguments = prepared.set_up()
        if prepared.seconds < _LONG_SECONDS:
            prepared.iteration(arguments)
        loop = loop_seconds(self.device, lambda: prepared.iteration(arguments), iterations)
        reply = {"seconds": loop}
        if self.case.device == "cuda" or self.case.ranks > 1:
            seconds = device_seconds(self.device, prepared.call, prepared.set_up, calls, prepared.host)
            reply = {"loop": loop, "seconds": seconds}
        self.problem.clear()
        return reply

    def longest(self, name: str) -> dict[str, Any]:
        """Return the fields of a record about the longest training step that fits into the case's limit."""
        assert isinstance(self.problem, TrainingProblem)
        return self.problem.longest(find_contender(self.case.function, name).make(self.case), self.device)

    def recover(self) -> None:
        """Drop the gradients of the last call, and release unused memory; an error means that the device is lost.

        Objects that exist now are frozen for the garbage collector until the next case: there is a collection before
        each turn, and with the frameworks loaded a full one takes longer than most calls.
        """
        if not hasattr(self, "problem"):
            return
        if self.case.ranks == 1:
            self.device.wait()
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
