"""Measure all variants of one model: loss, peak memory, the time of steps in turns, and the longest sequence."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.process import NotMeasured, Team
from benchmarks.training.worker import Training

__all__ = ["NoTimeLeft", "Result", "Trainer", "longest", "measure", "start_results"]

Result = dict[str, Any]
"""The line of a variant in the file of results."""

_GIB = 2**30
_MOST_TRIALS, _TOLERANCE, _MOST_GROWTH = 12, 0.03, 8
_OUT_OF_MEMORY = "out of memory"
# Make glibc return freed memory to the system; otherwise it would be missing in the measured peak.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}


class NoTimeLeft(Exception):
    """The time of the run is over. The results have what was measured before."""


class Trainer:
    """The measuring process. If a variant ends it, the next call starts another one with the same model.

    A call without an answer after `patience` seconds counts as failed.
    """

    def __init__(self, device: str, minutes: float | None, patience: float, start: Callable[..., Any] = Team) -> None:
        self._device, self._patience, self._start = device, patience, start
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._process: Any = None
        self._model: tuple[Any, ...] = ()

    def open(self, model: str, dtype: str, checkpointing: bool) -> None:
        """Replace the model."""
        self._model = ()
        self.ask("open", model, dtype, checkpointing)
        self._model = model, dtype, checkpointing

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Return the reply; NotMeasured if there is none, NoTimeLeft at the end of the run."""
        if self._process is None or not self._process.runs:
            self.close()
            self._process = self._start(Training, [(self._device,)], _ENVIRONMENT)
            if self._model:
                self.ask("open", *self._model)
        wait = min(self.seconds_left(), self._patience)
        if wait <= 0:
            raise NoTimeLeft
        try:
            reply: dict[str, Any] = self._process.ask(method, *arguments, seconds=None if wait == math.inf else wait)
        except NotMeasured:
            if self.seconds_left() <= 0:
                raise NoTimeLeft from None
            raise
        return reply

    def seconds_left(self) -> float:
        """Return the seconds until the end of the run."""
        return self._end - time.monotonic()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()


def start_results(variants: Sequence[str], **facts: Any) -> list[Result]:
    """Return the results of one model before the measurement, one for each variant, with facts of its lines."""
    missing: Result = {"status": "skipped", "reason": "no time left", "peak": None, "rounds": []}
    return [{**facts, "variant": name, **missing} for name in variants]


def measure(
    trainer: Trainer,
    results: Sequence[Result],
    save: Callable[[], None],
    *,
    steps: int,
    rounds: int,
    multiple: int,
    most_seconds: float,
) -> None:
    """Add the measurements to the results; a variant that fails gets a status and a reason.

    `rounds` are loops of `steps` steps. The longest sequence, a multiple of `multiple`, has a step of `most_seconds`.
    """
    left = list(results)
    tokens, limit = results[0]["tokens"], results[0]["limit"]

    def ask_each(*, add: Callable[[Result], None]) -> None:
        for result in list(left):
            try:
                add(result)
            except NotMeasured as failure:
                left.remove(result)
                result |= {"status": failure.status, "reason": str(failure)}
            save()

    def turn(result: Result) -> None:
        seconds = trainer.ask("steps", result["variant"], tokens, steps)["seconds"]
        result |= {"status": "measured", "reason": "", "rounds": [*result["rounds"], seconds]}

    try:
        trainer.open(results[0]["model"], results[0]["dtype"], results[0]["checkpointing"])
    except NotMeasured as failure:
        for result in results:
            result |= {"status": failure.status, "reason": str(failure)}
        return
    # The losses are of the same weights. They and the step whose peak is measured warm up for the turns.
    ask_each(add=lambda result: result.update(trainer.ask("loss", result["variant"], tokens)))
    ask_each(add=lambda result: result.update(peak=trainer.ask("peak", result["variant"], tokens)["peak"]))
    for _ in range(rounds):
        ask_each(add=turn)
        left.reverse()
    for result in results if limit else ():
        if result["status"] == "measured" or result["reason"] == _OUT_OF_MEMORY:
            _add_longest(trainer, result, multiple, lambda: min(most_seconds, 0.8 * trainer.seconds_left()))
            save()


def _add_longest(trainer: Trainer, result: Result, multiple: int, most_seconds: Callable[[], float]) -> None:
    """Add the longest sequence and the trials."""

    def trial(length: int) -> tuple[int | None, float]:
        try:
            reply = trainer.ask("peak", result["variant"], length)
        except NotMeasured as failure:
            if str(failure) != _OUT_OF_MEMORY:
                raise
            return None, 0.0
        if reply["peak"] is None:
            raise NotMeasured("skipped", "the peak of memory is unknown")
        return reply["peak"], reply["seconds"]

    seconds = statistics.median(result["rounds"]) if result["rounds"] else 0.0
    trials: dict[int, tuple[int | None, float]] = {result["tokens"]: (result["peak"], seconds)}
    limit = int(result["limit"] * _GIB)
    found: tuple[int | None, bool] = None, False
    try:
        found = longest(trial, trials, limit, multiple, most_seconds)
    except NotMeasured as failure:
        result["longest_reason"] = str(failure)
        fitting = [length for length, (peak, _) in trials.items() if peak is not None and peak <= limit]
        found = max(fitting, default=None), bool(fitting)
    finally:
        result |= {"longest": found[0], "at_least": found[1]}
        result["trials"] = [{"length": key, "peak": peak, "seconds": took} for key, (peak, took) in trials.items()]


def longest(
    trial: Callable[[int], tuple[int | None, float]],
    trials: dict[int, tuple[int | None, float]],
    limit: int,
    multiple: int,
    most_seconds: Callable[[], float],
) -> tuple[int | None, bool]:
    """Return the longest length whose peak is within the limit, to within 3%, and whether the search ended early.

    `trial(length)` returns the peak, None when memory did not suffice, and the seconds; `trials` has the first one, and
    gets all others. No step is made that should take more than `most_seconds()`, with time as the square of the length.
    The peak is nearly linear in the length: the next length is where the line through two peaks meets the limit. Every
    third one is halfway between what fits and what does not.
    """
    while True:
        known = sorted((length, peak) for length, (peak, _) in trials.items() if peak is not None)
        best = max((length for length, peak in known if peak <= limit), default=0)
        over = min((length for length in trials if length > best), default=math.inf)
        pair = known[-2:]
        if over < math.inf:  # the last that fits and the first that does not, or the two shortest
            pair = [one for one in known if one[0] in (best, over)] if best else known[:2]
        predicted = 2.0 * best if over == math.inf else (best + over) / 2
        if len(pair) == 2:
            (one, low), (two, high) = pair
            line = one + (limit - low) * (two - one) / (high - low) if high > low else math.inf
            ends = line < best + max(multiple, _TOLERANCE * best)
            predicted = line if over == math.inf or ends or len(trials) % 3 else predicted
        length = min(predicted, over - multiple, _MOST_GROWTH * (best or math.inf))
        least = best + max(multiple, _TOLERANCE * best)
        ended = length // multiple * multiple < least
        seconds = most_seconds()
        if best:
            length = min(length, best * (max(seconds, 0) / trials[best][1]) ** 0.5 if trials[best][1] else length)
        length = int(length // multiple * multiple)
        if length < least or seconds <= 0 or len(trials) >= _MOST_TRIALS:
            return best or None, bool(best) and not ended
        trials[length] = trial(length)
