"""The search for the longest sequence whose training step fits into a memory limit, with as few steps as possible.

The peak of a step is convex and nearly linear in the length. The search extrapolates from two lengths, makes a step at
the predicted one, and corrects itself with its peak. It ends when the next length would be less than 3% longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["Longest", "Search", "Trial"]

_MOST_TRIALS = 12
_TOLERANCE = 0.03
_MOST_GROWTH = 8


@dataclass(frozen=True)
class Trial:
    """A step at a length: its peak, None when memory did not suffice, and its seconds."""

    length: int
    peak: int | None
    seconds: float


@dataclass(frozen=True)
class Longest:
    """The longest length that was seen to fit, None if no length did; `at_least` if the search did not end."""

    length: int | None
    at_least: bool


class Search:
    """The trials so far, and what follows from them. Lengths are multiples of `multiple`."""

    def __init__(self, limit: int, multiple: int, first: Trial, hint: Trial | None) -> None:
        """`first` was made before. `hint` is the longest one of another variant: its length is tried before others."""
        self._limit, self._multiple, self._hint = limit, multiple, hint
        self._complete = False
        self.trials = [first]

    def run(self, measure: Callable[[int], Trial], most_seconds: Callable[[], float]) -> None:
        """Make trials that are not expected to take more than `most_seconds`, which is asked before each."""
        while len(self.trials) < _MOST_TRIALS:
            length = self._next(most_seconds())
            if length is None:
                return
            self.trials.append(measure(length))
        self._complete = self._bounds()[1] is not None

    @property
    def longest(self) -> Longest:
        """Return the result so far."""
        best = self.best
        return Longest(None if best is None else best.length, best is not None and not self._complete)

    @property
    def best(self) -> Trial | None:
        """Return the longest trial that fits."""
        return self._bounds()[0]

    def _bounds(self) -> tuple[Trial | None, Trial | None]:
        """Return the longest trial that fits and the shortest one that does not."""
        trials = _sorted(self.trials)
        fitting = [trial for trial in trials if trial.peak is not None and trial.peak <= self._limit]
        over = [trial for trial in trials if trial not in fitting]
        return fitting[-1] if fitting else None, over[0] if over else None

    def _next(self, most_seconds: float) -> int | None:
        """Return the length of the next trial, or None at the end."""
        best, over = self._bounds()
        length = self._predicted(best, over)
        if over is not None:
            length = min(length, over.length - self._multiple)
        if best is None:
            return self._rounded(length) or None
        enough = best.length + max(self._multiple, _TOLERANCE * best.length)
        self._complete = self._rounded(length) < enough
        affordable = self._rounded(min(length, self._length_within(most_seconds)))
        return affordable if affordable >= enough else None

    def _rounded(self, length: float) -> int:
        return max(0, math.floor(length / self._multiple) * self._multiple)

    def _predicted(self, best: Trial | None, over: Trial | None) -> float:
        """Return the length whose peak should be the limit."""
        if best is not None and over is not None:
            return self._between(best, over)
        known = self._known()
        if best is None:
            return self._on_line(*known[:2]) if len(known) > 1 else min(trial.length for trial in self.trials) / 2
        length = min(self._on_line(*known[-2:]), _MOST_GROWTH * best.length) if len(known) > 1 else math.inf
        if self._hint is not None and self._hint.length > (1 + _TOLERANCE) * best.length:
            return min(length, self._hint.length)
        return length if len(known) > 1 else 2.0 * best.length

    def _between(self, best: Trial, over: Trial) -> float:
        """Return where the line meets the limit. Each further trial at the same end halves the other one (Illinois)."""
        if over.peak is None:
            return (best.length + over.length) / 2
        assert best.peak is not None
        fits = [trial.peak is not None and trial.peak <= self._limit for trial in self.trials]
        halvings = next(count for count, fit in enumerate(reversed(fits)) if fit != fits[-1]) - 1
        room, excess = float(self._limit - best.peak), float(over.peak - self._limit)
        if fits[-1]:
            excess *= 0.5**halvings
        else:
            room *= 0.5**halvings
        return best.length + room / (room + excess) * (over.length - best.length)

    def _known(self) -> list[Trial]:
        """Return the trials with a peak, the shortest first."""
        return _sorted(trial for trial in self.trials if trial.peak is not None)

    def _on_line(self, first: Trial, second: Trial) -> float:
        """Return where the line through two trials meets the limit, infinity if it falls."""
        assert first.peak is not None
        assert second.peak is not None
        slope = (second.peak - first.peak) / (second.length - first.length)
        return first.length + (self._limit - first.peak) / slope if slope > 0 else math.inf

    def _length_within(self, seconds: float) -> float:
        """Return the length of a step of these seconds; its exponent, at most 2, is that of the two longest steps."""
        if seconds <= 0:
            return 0.0
        timed = _sorted(self._known() + ([] if self._hint is None else [self._hint]))
        longest = timed[-1]
        shorter = [trial for trial in timed if trial.length < longest.length]
        exponent = 2.0
        if shorter:
            ratio = math.log(longest.seconds / shorter[-1].seconds) / math.log(longest.length / shorter[-1].length)
            exponent = min(max(ratio, 1.0), 2.0)
        return float(longest.length * (seconds / longest.seconds) ** (1 / exponent))


def _sorted(trials: Iterable[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: trial.length)
