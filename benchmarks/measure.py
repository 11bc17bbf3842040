"""Measure a case on the CPU: each contender runs in its own process and takes turns with the base.

A first call warms up the full size and measures the peak memory. Then base and contender take turns, each in its own
process, and only one of them works at a time. A temporary slowdown of the machine affects both times of a pair, so
their ratio is reliable even if the times are not.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cases import Case
from benchmarks.contenders import find_contender
from benchmarks.process import NotMeasured, WorkerProcess
from benchmarks.protocol import FirstCall, Time, WriteTruth
from benchmarks.records import Record, compare_with_judge

__all__ = ["Plan", "measure_case"]

# Idle worker threads keep a core busy for a while after their work, in some OpenMP runtimes for 0.2 s.
_SETTLE_SECONDS = 0.25
_SAMPLE_SECONDS = 0.25
_MOST_CALLS_PER_SAMPLE = 20
_FEWEST_PAIRS = 2
_JUDGE = "torch"


@dataclass(frozen=True)
class Plan:
    """The length of a measurement: `repeats` pairs, or fewer (at least two) if they would exceed `budget` seconds."""

    repeats: int
    budget: float
    threads: int | None


def measure_case(case: Case, plan: Plan, machine: dict[str, Any], progress: Callable[[str], None]) -> list[Record]:
    """Return one record per contender of the case, the base first; `progress` gets each contender's name in turn."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        turns = _Turns(case, plan, progress, folder, stack)
        records = turns.measure_all()
    for record in records:
        record.machine = machine | record.machine
    compare_with_judge(records, _JUDGE)
    return records


class _Turns:
    """The processes of one case. All are started at once, but only one works at a time."""

    def __init__(self, case: Case, plan: Plan, progress: Callable[[str], None], folder: Path, stack: ExitStack) -> None:
        self.case = case
        self.plan = plan
        self.progress = progress
        self.base = case.contenders[0]
        self.truth: str | None = None
        self.no_truth = ""
        if case.accuracy:
            self._write_truth(str(folder / "truth"))
        self.refusals: dict[str, NotMeasured] = {}
        self.workers: dict[str, WorkerProcess] = {}
        for name in case.contenders:
            if reason := _lack_of_memory(case, name):
                self.refusals[name] = NotMeasured("skipped", reason)
            else:
                self.workers[name] = stack.enter_context(WorkerProcess(case, name, plan.threads))

    def _write_truth(self, path: str) -> None:
        self.progress("float64")
        try:
            with WorkerProcess(self.case, self.base, self.plan.threads) as worker:
                worker.wait_until_ready()
                worker.ask(WriteTruth(path))
            self.truth = path
        except NotMeasured as failure:
            self.no_truth = f"no float64 to compare with: {failure}"

    def measure_all(self) -> list[Record]:
        for name, worker in self.workers.items():
            try:
                worker.wait_until_ready()
            except NotMeasured as refusal:
                self.refusals[name] = refusal
        base = self._first_call(self.base)
        records = [base]
        for name in self.case.contenders[1:]:
            record = self._first_call(name)
            record.base_peak_bytes, record.base_gradient_bytes = base.peak_bytes, base.gradient_bytes
            if record.status == "measured":
                self._time(record, base)
            records.append(record)
        if base.status == "measured" and not base.seconds:
            self._time(base, None)
        return records

    def _first_call(self, name: str) -> Record:
        self.progress(name)
        record = Record(self.case, name, reason=self.no_truth)
        if not find_contender(self.case.function, name).in_place:
            record.gradient_bytes = self.case.gradient_bytes
        try:
            if name in self.refusals:
                raise self.refusals[name]
            worker = self.workers[name]
            record.machine = {"threads": worker.threads}
            time.sleep(_SETTLE_SECONDS)
            reply = worker.ask(FirstCall(self.truth))
        except NotMeasured as failure:
            record.status, record.reason = failure.status, str(failure)
            return record
        record.first_call_seconds = reply.pop("seconds")
        for key, value in reply.items():
            setattr(record, key, value)
        return record

    def _time(self, record: Record, base: Record | None) -> None:
        """Add the times of both to their records. If the base does not run, time the contender alone."""
        if base is not None and base.status != "measured":
            base = None
        taking_turns = [record] if base is None else [base, record]
        calls = {each.contender: _calls_per_sample(each.first_call_seconds) for each in taking_turns}
        record.calls_per_sample = calls[record.contender]
        one_round = sum(calls[each.contender] * each.first_call_seconds for each in taking_turns)
        rounds = min(self.plan.repeats, max(_FEWEST_PAIRS, int(self.plan.budget / one_round)))
        for _ in range(rounds):
            samples: list[dict[str, float]] = []
            for each in taking_turns:
                time.sleep(_SETTLE_SECONDS)
                try:
                    samples.append(self.workers[each.contender].ask(Time(calls[each.contender])))
                except NotMeasured as failure:
                    each.status, each.reason = failure.status, f"while it was timed: {failure}"
                    return
            for each, sample in zip(taking_turns, samples, strict=True):
                each.seconds.append(sample["seconds"])
                each.disturbance.append(sample["disturbance"])
            if base is not None:
                record.pairs.append((base.seconds[-1], record.seconds[-1]))


def _calls_per_sample(seconds: float) -> int:
    """Return the number of calls of a sample, so that clock noise and scheduling are small compared with its time."""
    return max(1, min(_MOST_CALLS_PER_SAMPLE, math.ceil(_SAMPLE_SECONDS / seconds)))


def _lack_of_memory(case: Case, name: str) -> str:
    """Return the reason why free memory is not sufficient for this contender; empty if it is."""
    needed = find_contender(case.function, name).memory_needed(case)
    available = psutil.virtual_memory().available
    if needed <= available:
        return ""
    return f"needs about {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are free"
