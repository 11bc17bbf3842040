"""Measure a case: prepare all contenders, then let them take turns in rounds.

The base of the ratios takes part in every round. Ratios are computed within a round, so that temporary slowdowns of the
machine affect both times. The order differs by round, so that no contender always follows the same other one.

On a GPU all contenders share a process and its inputs, unless they need other environment variables. On a CPU each has
its own, since resident memory is that of a process. Only one process works at a time. If a contender crashes it, the
contender is left out, and the case starts again in new processes. With several ranks there is one process per rank.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cases import Case
from benchmarks.contenders import find_contender
from benchmarks.process import NotMeasured, Team
from benchmarks.records import Record, compare_with_judge
from benchmarks.session import Session

__all__ = ["Measurement", "OutOfTime", "Plan"]

_LOOP = {"cuda": (0.04, 4, 100), "cpu": (0.25, 1, 20)}
"""Seconds, and the fewest and most calls of a loop."""
_DEVICE_SECONDS, _CALLS = 0.02, (1, 5)
_FEWEST_ROUNDS = 3
_SETTLE_SECONDS = 0.25
"""Idle threads of OpenMP keep a core busy for a while after their work."""
_PREPARE_SECONDS = {"cuda": 180.0, "cpu": 900.0}
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
_GLOO = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class OutOfTime(Exception):
    """The time limit of the run is reached. The remaining cases are left for another run."""


@dataclass(frozen=True)
class Plan:
    """At most `repeats` rounds, fewer if they would take more than `budget` seconds per case.

    No work starts after `deadline`, a time of `time.monotonic`.
    """

    repeats: int
    budget: float
    deadline: float = float("inf")
    ranks: int = 1

    def check(self) -> None:
        """Raise OutOfTime if the deadline is past."""
        if time.monotonic() > self.deadline:
            raise OutOfTime


class _Lost(Exception):
    """A process has ended. The contender that was running is recorded as refused."""


class Measurement:
    """The measuring processes, for any number of cases; a context manager that ends them."""

    def __init__(self, device: str, plan: Plan, start: Callable[..., Any] = Team) -> None:
        """Start a process and request the facts of its device; NotMeasured if it has no GPU."""
        self.plan = plan
        self._device, self._start = device, start
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._processes: dict[Any, Any] = {}
        self._open: dict[Any, Case] = {}
        try:
            self.facts = self._process("", {}).ask("describe", seconds=_PREPARE_SECONDS[device])
        except NotMeasured:
            self.__exit__()
            raise

    def measure(self, case: Case, machine: dict[str, Any], progress: Callable[[str], None]) -> list[Record]:
        """Return one record per contender of the case, the base first; `progress` gets each name at its turn.

        Raise OutOfTime if the deadline is reached.
        """
        refusals: dict[str, NotMeasured] = {}
        while True:
            if case.device == "cpu" and case.ranks == 1:
                self._end()  # fresh memory for each case
            try:
                records = self._attempt(case, refusals, progress)
                break
            except _Lost:
                self._end()
        compare_with_judge(records, "torch fp32 logits" if case.device == "cuda" else "torch")
        for record in records:
            record.machine = machine
        return records

    def _attempt(self, case: Case, refusals: dict[str, NotMeasured], progress: Callable[[str], None]) -> list[Record]:
        """Measure all contenders that are not refused; record those that fail."""
        records = {name: _new_record(case, name) for name in case.contenders}
        turns: dict[str, tuple[int, int]] = {}
        round_seconds = 0.0
        for name, record in records.items():
            self.plan.check()
            progress(name)
            try:
                if name in refusals:
                    raise refusals[name]
                _refuse_swapping(case, name)
                reply = self._ask(case, name, "prepare", refusals)
                seconds = reply.pop("call_seconds")
                turns[name] = _calls(seconds, *_LOOP[case.device]), _calls(seconds, _DEVICE_SECONDS, *_CALLS)
                round_seconds += (1 + sum(turns[name])) * seconds
                vars(record).update(reply)
            except NotMeasured as failure:
                record.status, record.reason = failure.status, str(failure)
        rounds = min(self.plan.repeats, max(_FEWEST_ROUNDS, int(self.plan.budget / (round_seconds or 1.0))))
        progress(f"{len(turns)} taking turns, {rounds} rounds")
        for number in range(rounds):
            self.plan.check()
            self._round(case, random.Random(number), records, turns, refusals)
        for name, record in records.items() if case.limit else ():
            if name in turns or record.reason == "out of memory":
                self.plan.check()
                progress(f"longest sequence of {name}")
                with suppress(NotMeasured):
                    vars(record).update(self._ask(case, name, "longest", refusals))
        base = records[case.contenders[0]]
        for record in records.values():
            if record is not base:
                record.base_peak_bytes, record.base_gradient_bytes = base.peak_bytes, base.gradient_bytes
        return list(records.values())

    def _round(
        self,
        case: Case,
        order: random.Random,
        records: dict[str, Record],
        turns: dict[str, tuple[int, int]],
        refusals: dict[str, NotMeasured],
    ) -> None:
        replies: dict[str, dict[str, float]] = {}
        for name in order.sample(list(turns), len(turns)):
            if case.device == "cpu":
                time.sleep(_SETTLE_SECONDS)
            try:
                replies[name] = self._ask(case, name, "turn", refusals, *turns[name])
            except NotMeasured as failure:
                records[name].status, records[name].reason = failure.status, f"while it was timed: {failure}"
                del turns[name]
        base = replies.get(case.contenders[0])
        for name, reply in replies.items():
            record = records[name]
            record.seconds.append(reply["seconds"])
            record.loop += [reply["loop"]] if "loop" in reply else []
            if base is not None and base is not reply:
                record.pairs.append((base["seconds"], reply["seconds"]))
                record.loop_pairs += [(base["loop"], reply["loop"])] if "loop" in reply else []

    def _ask(self, case: Case, name: str, method: str, refusals: dict[str, NotMeasured], *turn: int) -> dict[str, Any]:
        """Send a request to the process of this contender; _Lost if the process ends."""
        alone = case.device == "cpu" and case.ranks == 1
        process = self._process(name if alone else "", dict(find_contender(case.function, name).environment))
        seconds = _PREPARE_SECONDS[case.device]
        try:
            if self._open.get(process) != case:
                truth = str(Path(self._folder, str(abs(hash(case))))) if alone else None
                process.ask("open", case, truth, seconds=seconds)
                self._open[process] = case
            reply: dict[str, Any] = process.ask(method, name, *turn, seconds=seconds)
            return reply
        except NotMeasured as failure:
            refusals[name] = failure
            if not process.runs:
                raise _Lost from None
            raise

    def _process(self, owner: str, environment: dict[str, str]) -> Any:
        key = owner, *sorted(environment.items())
        if key not in self._processes:
            plan = self.plan
            if plan.ranks > 1:
                usual = _NO_MULTICAST | (_GLOO if self._device == "cpu" else {})
                environment |= {name: os.environ.get(name, value) for name, value in usual.items()}
            meeting = str(Path(tempfile.mkdtemp(dir=self._folder), "meeting"))
            ranks = [(self._device, plan.ranks, rank, meeting) for rank in range(plan.ranks)]
            self._processes[key] = self._start(Session, ranks, environment)
        return self._processes[key]

    def _end(self) -> None:
        for process in self._processes.values():
            process.end()
        self._processes.clear()
        self._open.clear()

    def __enter__(self) -> Measurement:
        """Return self: the process has been running since construction."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        self._end()
        self._stack.close()


def _calls(call_seconds: float, seconds: float, fewest: int, most: int) -> int:
    return min(max(math.ceil(seconds / call_seconds), fewest), most)


def _refuse_swapping(case: Case, name: str) -> None:
    """Raise NotMeasured if the free memory of a CPU is not sufficient for this contender."""
    logits_sized = 3 if case.backward else 1
    needed = case.logits_bytes * logits_sized * find_contender(case.function, name).holds_logits
    free = psutil.virtual_memory().available
    if case.device == "cpu" and needed + 2 * case.gradient_bytes > free:
        raise NotMeasured("skipped", f"needs about {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free")


def _new_record(case: Case, name: str) -> Record:
    record = Record(case, name)
    contender = find_contender(case.function, name)
    if contender.kind != "floor" and not contender.in_place:
        record.gradient_bytes = case.gradient_bytes
    return record
