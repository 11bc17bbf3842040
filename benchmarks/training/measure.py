"""Measure all variants of one model: loss, peak memory, the time of steps in turns, and the longest sequence."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from benchmarks.process import NotMeasured, Process
from benchmarks.protocol import OUT_OF_MEMORY, FirstStep, OpenTraining, PeakStep, Request, Steps
from benchmarks.training.longest import Search, Trial

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Deadline", "NoTimeLeft", "Plan", "Result", "Trainer", "measure"]

Result = dict[str, Any]
"""The line of a variant in the file of results."""

_GIB = 2**30
_NO_TIME = "no time left"
# Make glibc return freed memory to the system; otherwise it would be missing in the measured peak.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}


class NoTimeLeft(Exception):
    """The time of the run is over. The results have what was measured before."""


class Deadline:
    """The time of a run, and its end, if it has one."""

    def __init__(self, minutes: float | None) -> None:
        self._start = time.monotonic()
        self._seconds = float("inf") if minutes is None else 60 * minutes

    def spent(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Return the seconds left, infinity without an end."""
        return self._seconds - self.spent()


@dataclass(frozen=True)
class Plan:
    """What is measured of one model; with a limit of 0 no longest sequence."""

    model: OpenTraining
    variants: Sequence[str]
    tokens: int
    steps: int
    rounds: int
    limit: float
    multiple: int
    most_seconds: float

    @property
    def title(self) -> str:
        """The model and whether it recomputes activations."""
        return f"{self.model.model}, checkpointing {'on' if self.model.checkpointing else 'off'}"

    def results(self) -> list[Result]:
        """Return the results before the measurement, one for each variant."""
        facts = {**vars(self.model), "tokens": self.tokens, "limit": self.limit}
        missing: Result = {"status": "skipped", "reason": _NO_TIME, "peak": None, "rounds": []}
        return [{**facts, "variant": name, **missing} for name in self.variants]


class Trainer:
    """The measuring process. If a variant ends it, the next request starts another one with the same model.

    A request without an answer after `patience` seconds counts as failed.
    """

    def __init__(self, deadline: Deadline, patience: float) -> None:
        self._deadline, self._patience = deadline, patience
        self._stack = ExitStack()
        self._process: Process | None = None
        self._model: OpenTraining | None = None

    def open(self, model: OpenTraining) -> None:
        """Replace the model."""
        self._model = None
        self.ask(model)
        self._model = model

    def ask(self, request: Request) -> dict[str, Any]:
        """Return the reply; NotMeasured if there is none, NoTimeLeft at the end of the run."""
        if self._process is None or not self._process.runs:
            self._stack.close()
            self._process = self._stack.enter_context(Process("benchmarks.training.worker", _ENVIRONMENT))
            if self._model is not None:
                self._ask(self._process, self._model)
        return self._ask(self._process, request)

    def _ask(self, process: Process, request: Request) -> dict[str, Any]:
        wait = min(self._deadline.left(), self._patience)
        if wait <= 0:
            raise NoTimeLeft
        try:
            return process.ask(request, None if wait == float("inf") else wait)
        except NotMeasured:
            if self._deadline.left() <= 0:
                raise NoTimeLeft from None
            raise

    def seconds_left(self) -> float:
        """Return the seconds until the end of the run."""
        return self._deadline.left()

    def __enter__(self) -> Self:
        """Return self: the process starts with the first request."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the process."""
        self._stack.close()


def measure(trainer: Trainer, plan: Plan, results: Sequence[Result], save: Callable[[], None]) -> None:
    """Add the measurements to the results of the plan; a variant that fails gets a status and a reason."""
    try:
        trainer.open(plan.model)
    except NotMeasured as failure:
        for result in results:
            result |= {"status": failure.status, "reason": str(failure)}
        return
    _measure_steps(trainer, plan, results, save)
    if plan.limit:
        hint: Trial | None = None
        for result in results:
            if result["status"] == "measured" or result["reason"] == OUT_OF_MEMORY:
                best = _measure_longest(trainer, plan, result, hint)
                hint = max(filter(None, (hint, best)), key=lambda trial: trial.length, default=None)
                save()


def _measure_steps(trainer: Trainer, plan: Plan, results: Sequence[Result], save: Callable[[], None]) -> None:
    """Add loss, peak and times.

    The losses are of the same weights. They and the step whose peak is measured warm up for the turns.
    """
    left = list(results)

    def ask_each(ask: Callable[[Result], None]) -> None:
        for result in list(left):
            try:
                ask(result)
            except NotMeasured as failure:
                left.remove(result)
                result |= {"status": failure.status, "reason": str(failure)}
            save()

    def turn(result: Result) -> None:
        reply = trainer.ask(Steps(result["variant"], plan.tokens, plan.steps))
        result |= {"status": "measured", "reason": "", "rounds": [*result["rounds"], reply["seconds"]]}

    ask_each(lambda result: result.update(trainer.ask(FirstStep(result["variant"], plan.tokens))))
    ask_each(lambda result: result.update(peak=trainer.ask(PeakStep(result["variant"], plan.tokens))["peak"]))
    for _ in range(plan.rounds):
        ask_each(turn)
        left.reverse()


def _measure_longest(trainer: Trainer, plan: Plan, result: Result, hint: Trial | None) -> Trial | None:
    """Add the longest sequence and the trials, and return the longest one that fits; `hint` is another variant's."""

    def trial(length: int) -> Trial:
        try:
            reply = trainer.ask(PeakStep(result["variant"], length))
        except NotMeasured as failure:
            if str(failure) != OUT_OF_MEMORY:
                raise
            return Trial(length, None, 0.0)
        if reply["peak"] is None:
            raise NotMeasured("skipped", "the peak of memory is unknown")
        return Trial(length, **reply)

    seconds = statistics.median(result["rounds"]) if result["rounds"] else 0.0
    search = Search(int(plan.limit * _GIB), plan.multiple, Trial(plan.tokens, result["peak"], seconds), hint)
    try:
        search.run(trial, lambda: min(plan.most_seconds, 0.8 * trainer.seconds_left()))
    except NotMeasured as failure:
        result["longest_reason"] = str(failure)
    finally:
        result |= {"longest": search.longest.length, "at_least": search.longest.at_least}
        result["trials"] = [vars(each) for each in search.trials]
    return search.best
