"""How a case is measured on a GPU: everybody is prepared, then all take turns, round after round.

The base of the ratios has its turn in every round like the others, and a ratio is taken within a round, so what slows
the chip down for a while (its heat, its neighbours) slows both. Every round has an order of its own: who always came
after the same contender would always find the chip as warm or as cool as that one leaves it. A contender that takes the
device down with it is left out, and the case begins again in a new process.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from benchmarks.cases import Case
from benchmarks.contenders import find_contender
from benchmarks.process import NotMeasured, Process
from benchmarks.protocol import Describe, OpenCase, Prepare, Turn
from benchmarks.records import Record

__all__ = ["GpuMeasurement", "GpuPlan"]

_JUDGE = "torch fp32 logits"
_FEWEST_ROUNDS = 3
_LONG_CALL = 0.02
_CALLS, _CALLS_IF_LONG = 3, 1
_PREPARE_SECONDS, _TURN_SECONDS = 240.0, 60.0


@dataclass(frozen=True)
class GpuPlan:
    """How long to measure: at most `repeats` rounds, fewer if they would take more than `budget` seconds a case.

    No work begins after `deadline`, a time of `time.monotonic`.
    """

    repeats: int
    budget: float
    deadline: float = float("inf")

    @property
    def over(self) -> bool:
        """Whether the deadline is past."""
        return time.monotonic() > self.deadline


@dataclass(frozen=True)
class _TurnPlan:
    """A contender's turn: how many calls are timed, and about how long it takes."""

    calls: int
    seconds: float


class _Lost(Exception):
    """The process has ended; who was at work by then is noted."""


class GpuMeasurement:
    """A process that holds the GPU, for as many cases as there are; a context manager that ends it."""

    def __init__(self, device: str, plan: GpuPlan) -> None:
        """Start the process and ask what it runs on; NotMeasured if it sees no GPU."""
        self.plan = plan
        self._process = _start()
        self.facts = self._process.ask(Describe(device), _PREPARE_SECONDS)

    def measure(self, case: Case, machine: dict[str, Any], progress: Callable[[str], None]) -> list[Record]:
        """Return one record per contender of the case, the base first; `progress` is told each name at its turn."""
        refusals: dict[str, NotMeasured] = {}
        while True:
            try:
                records = self._attempt(case, refusals, progress)
                break
            except _Lost:
                continue
        _compare_with_judge(records)
        base = case.contenders[0]
        for name in case.left_out:
            records.append(Record(case, name, base, status="left out", reason="not run at this size; --full runs it"))
        for record in records:
            record.machine = machine
        return records

    def _attempt(self, case: Case, refusals: dict[str, NotMeasured], progress: Callable[[str], None]) -> list[Record]:
        """Measure whoever is not refused yet, and note who has to be."""
        if not self._process.runs:
            self._process.__exit__(None, None, None)
            self._process = _start()
        records = {name: _new_record(case, name) for name in case.contenders}
        turns: dict[str, _TurnPlan] = {}
        try:
            if not self.plan.over:
                self._process.ask(OpenCase(case), _PREPARE_SECONDS)
        except NotMeasured as failure:
            for name in case.contenders:
                refusals.setdefault(name, failure)
        for name, record in records.items():
            if name not in refusals:
                progress(name)
                self._prepare(record, refusals, turns)
            if name in refusals:
                record.status, record.reason = refusals[name].status, str(refusals[name])
        self._rounds(case, records, turns, refusals, progress)
        return list(records.values())

    def _prepare(self, record: Record, refusals: dict[str, NotMeasured], turns: dict[str, _TurnPlan]) -> None:
        name = record.contender
        if self.plan.over:
            refusals[name] = NotMeasured("skipped", "the time for the whole run was over")
            return
        try:
            reply = self._process.ask(Prepare(name), _PREPARE_SECONDS)
        except NotMeasured as failure:
            self._refuse(name, failure, refusals)
            return
        call_seconds, turn_seconds = reply.pop("call_seconds"), reply.pop("turn_seconds")
        calls = _CALLS_IF_LONG if call_seconds > _LONG_CALL else _CALLS
        turns[name] = _TurnPlan(calls, turn_seconds * (1 + calls) / 2)
        for key, value in reply.items():
            setattr(record, key, value)

    def _rounds(
        self,
        case: Case,
        records: dict[str, Record],
        turns: dict[str, _TurnPlan],
        refusals: dict[str, NotMeasured],
        progress: Callable[[str], None],
    ) -> None:
        if not turns:
            return
        progress(f"{len(turns)} taking turns")
        one_round = sum(turn.seconds for turn in turns.values())
        rounds = min(self.plan.repeats, max(_FEWEST_ROUNDS, int(self.plan.budget / one_round)))
        base = case.contenders[0]
        names = list(turns)
        for number in range(rounds):
            if self.plan.over and number >= _FEWEST_ROUNDS:
                return
            medians: dict[str, float] = {}
            for name in random.Random(number).sample(names, len(names)):
                try:
                    seconds = self._process.ask(Turn(name, turns[name].calls), _TURN_SECONDS)["seconds"]
                except NotMeasured as failure:
                    self._refuse(name, failure, refusals)
                    records[name].status, records[name].reason = failure.status, f"while it was timed: {failure}"
                    continue
                records[name].seconds += seconds
                medians[name] = statistics.median(seconds)
            names = [name for name in names if name not in refusals]
            if not names:
                return
            for name in medians:
                if name != base and base in medians:
                    records[name].pairs.append((medians[base], medians[name]))

    def _refuse(self, name: str, failure: NotMeasured, refusals: dict[str, NotMeasured]) -> None:
        refusals[name] = failure
        if not self._process.runs:
            raise _Lost

    def __enter__(self) -> GpuMeasurement:
        """Nothing more to do: the process runs since construction."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the process."""
        self._process.__exit__(kind, error, traceback)


def _start() -> Process:
    return Process("benchmarks.gpu.worker")


def _new_record(case: Case, name: str) -> Record:
    record = Record(case, name, case.contenders[0])
    contender = find_contender(case.function, name)
    if contender.kind != "floor" and not contender.in_place:
        record.gradient_bytes = replace(case, **contender.changes).gradient_bytes
    return record


def _compare_with_judge(records: list[Record]) -> None:
    """Hand the errors of the unfused computation to all records of its case."""
    judge = next((record for record in records if record.contender == _JUDGE), None)
    if judge is None or judge.status != "measured":
        return
    for record in records:
        record.judge = judge.contender
        record.judge_input_gradient_error = judge.input_gradient_error
        record.judge_weight_gradient_error = judge.weight_gradient_error
