"""Measure a case on a GPU: prepare all contenders, then let them take turns in rounds.

The base of the ratios takes part in every round. Ratios are computed within a round, so that temporary slowdowns of the
chip affect both times. The order differs by round, so that no contender always follows the same other one and finds the
chip at its temperature. Contenders with other environment variables have their own process, which is idle while others
run. If a contender crashes the process, it is left out, and the case starts again in new processes.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from benchmarks.cases import Case
from benchmarks.contenders import find_contender
from benchmarks.process import NotMeasured, Process
from benchmarks.progress import OutOfTime
from benchmarks.protocol import Describe, OpenCase, Prepare, Request, Turn
from benchmarks.records import Record, compare_with_judge

__all__ = ["Asked", "GpuMeasurement", "GpuPlan"]

_JUDGE = "torch fp32 logits"
_FEWEST_ROUNDS = 3
_LOOP_SECONDS, _ITERATIONS = 0.04, (4, 100)
_DEVICE_SECONDS, _CALLS = 0.02, (1, 5)
_PREPARE_SECONDS, _TURN_SECONDS = 110.0, 30.0


@dataclass(frozen=True)
class GpuPlan:
    """The plan: at most `repeats` rounds, fewer if they would take more than `budget` seconds per case.

    No work starts after `deadline`, a time of `time.monotonic`.
    """

    repeats: int
    budget: float
    deadline: float = float("inf")

    def check(self) -> None:
        """Raise OutOfTime if the deadline is past."""
        if time.monotonic() > self.deadline:
            raise OutOfTime


class Asked(Protocol):
    """A process that measures, `benchmarks.process.Process`, or several that act as one."""

    @property
    def runs(self) -> bool:
        """Whether the process is still running."""

    def ask(self, request: Request, seconds: float | None = None) -> dict[str, Any]:
        """Return the reply to one request, or raise NotMeasured."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the process."""


def _start(environment: dict[str, str]) -> Asked:
    return Process("benchmarks.gpu.worker", environment)


class _Lost(Exception):
    """A process has ended. The contender that was running is recorded as refused."""


class GpuMeasurement:
    """The processes that use the GPU, for any number of cases; a context manager that ends them."""

    def __init__(self, device: str, plan: GpuPlan, start: Callable[[dict[str, str]], Asked] = _start) -> None:
        """Start a process and request the facts of its device; NotMeasured if it has no GPU.

        `start` starts a process with additional environment variables.
        """
        self.plan = plan
        self._start = start
        self._processes: dict[tuple[tuple[str, str], ...], Asked] = {}
        self._open: dict[Asked, Case] = {}
        self.facts = self._process({}).ask(Describe(device), _PREPARE_SECONDS)

    def measure(self, case: Case, machine: dict[str, Any], progress: Callable[[str], None]) -> list[Record]:
        """Return one record per contender of the case, the base first; `progress` gets each name at its turn.

        Raise OutOfTime if the deadline is reached.
        """
        refusals: dict[str, NotMeasured] = {}
        while True:
            try:
                records = self._attempt(case, refusals, progress)
                break
            except _Lost:
                self._end()
        compare_with_judge(records, _JUDGE)
        for record in records:
            record.machine = machine
        return records

    def _attempt(self, case: Case, refusals: dict[str, NotMeasured], progress: Callable[[str], None]) -> list[Record]:
        """Measure all contenders that are not refused; record those that fail."""
        records = {name: _new_record(case, name) for name in case.contenders}
        turns: dict[str, Turn] = {}
        round_seconds = 0.0
        for name, record in records.items():
            self.plan.check()
            progress(name)
            if name not in refusals:
                try:
                    reply = self._ask(case, name, Prepare(name), refusals)
                    turns[name], seconds = _plan_turn(name, reply.pop("call_seconds"), reply.pop("turn_seconds"))
                    round_seconds += seconds
                    for key, value in reply.items():
                        setattr(record, key, value)
                except NotMeasured as failure:
                    refusals[name] = failure
            if name in refusals:
                record.status, record.reason = refusals[name].status, str(refusals[name])
        rounds = min(self.plan.repeats, max(_FEWEST_ROUNDS, int(self.plan.budget / (round_seconds or 1.0))))
        progress(f"{len(turns)} taking turns, {rounds} rounds")
        for number in range(rounds):
            self.plan.check()
            self._round(case, random.Random(number), records, turns, refusals)
        return list(records.values())

    def _round(
        self,
        case: Case,
        order: random.Random,
        records: dict[str, Record],
        turns: dict[str, Turn],
        refusals: dict[str, NotMeasured],
    ) -> None:
        replies: dict[str, dict[str, float]] = {}
        for name in order.sample(list(turns), len(turns)):
            try:
                replies[name] = self._ask(case, name, turns[name], refusals)
            except NotMeasured as failure:
                refusals[name] = failure
                records[name].status, records[name].reason = failure.status, f"while it was timed: {failure}"
                del turns[name]
        base = replies.get(case.contenders[0])
        for name, reply in replies.items():
            records[name].seconds.append(reply["seconds"])
            records[name].loop.append(reply["loop"])
            if base is not None and base is not reply:
                records[name].pairs.append((base["seconds"], reply["seconds"]))
                records[name].loop_pairs.append((base["loop"], reply["loop"]))

    def _ask(self, case: Case, name: str, request: Request, refusals: dict[str, NotMeasured]) -> dict[str, Any]:
        """Send a request to the process of this contender; _Lost if the process ends."""
        process = self._process(dict(find_contender(case.function, name).environment))
        try:
            if self._open.get(process) != case:
                process.ask(OpenCase(case), _PREPARE_SECONDS)
                self._open[process] = case
            return process.ask(request, _PREPARE_SECONDS if isinstance(request, Prepare) else _TURN_SECONDS)
        except NotMeasured as failure:
            if not process.runs:
                refusals[name] = failure
                raise _Lost from None
            raise

    def _process(self, environment: dict[str, str]) -> Asked:
        key = tuple(sorted(environment.items()))
        if key not in self._processes:
            self._processes[key] = self._start(environment)
        return self._processes[key]

    def _end(self) -> None:
        for process in self._processes.values():
            process.__exit__(None, None, None)
        self._processes.clear()
        self._open.clear()

    def __enter__(self) -> GpuMeasurement:
        """Return self: the process has been running since construction."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the processes."""
        self._end()


def _plan_turn(name: str, call_seconds: float, turn_seconds: float) -> tuple[Turn, float]:
    """Return a turn and its estimated seconds; `turn_seconds` is the time of three calls."""
    iterations, calls = (
        min(max(math.ceil(seconds / call_seconds), fewest), most)
        for seconds, (fewest, most) in ((_LOOP_SECONDS, _ITERATIONS), (_DEVICE_SECONDS, _CALLS))
    )
    return Turn(name, iterations, calls), turn_seconds + (iterations + calls) * call_seconds


def _new_record(case: Case, name: str) -> Record:
    record = Record(case, name)
    contender = find_contender(case.function, name)
    if contender.kind != "floor" and not contender.in_place:
        record.gradient_bytes = case.gradient_bytes
    return record
