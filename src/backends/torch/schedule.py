"""Which rows `linear_cross_entropy` computes, in which order and how many at a time: ignored rows are left out.

How many rows are left has to be known before a matrix product starts. On the CPU that is a look at memory. On CUDA the
number comes from the device: rows to compute are put first, the first chunk starts without knowing how many there
are, and only before the second does the host wait for the number, while the device has the first chunk to work on and
never idles. One chunk alone, or a CUDA graph that is being captured, computes all rows and waits for nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts
from xent.backends.torch.results import Results, scattered

__all__ = ["Part", "Schedule"]


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of the schedule's order."""

    start: int
    stop: int
    rows: Tensor | None
    """(R,) int64, which rows of the call these are; None where they are [start, stop) themselves."""
    last: bool
    """Whether nothing follows for certain."""

    def take(self, values: Tensor) -> Tensor:
        """Return these rows of (N, ...) values of the call."""
        return values[self.start : self.stop] if self.rows is None else values[self.rows]

    def put(self, values: Tensor, place: Tensor) -> None:
        """Write (R, ...) values to these rows of (N, ...) `place`."""
        if self.rows is None:
            place[self.start : self.stop] = values
        else:
            place.index_copy_(0, self.rows, values.to(place.dtype))


class Schedule:
    """The rows of a call in the order in which they are computed, `step` at a time."""

    def __init__(self, facts: Facts, step: int) -> None:
        self.step, self._all = max(step, 1), len(facts.weight)
        # Statistics are due for every row with a target, even one of weight 0.
        idle = facts.ignored if facts.spec.stats or facts.dead is None else facts.dead
        self._order: Tensor | None = None
        self._awaited: tuple[torch.cuda.Event, Tensor] | None = None
        self.count = self._all
        """How many rows are computed, as far as is known."""
        if idle.device.type == "cpu":
            if bool(idle.any()):
                self._order = (~idle).nonzero()[:, 0]
                self.count = len(self._order)
        elif idle.device.type == "cuda" and self._all > self.step and not torch.cuda.is_current_stream_capturing():
            self._order = idle.argsort(stable=True)
            self._await_count(idle)
        self.facts = facts if self._order is None else facts.select(self._order)

    @property
    def leaves_out(self) -> bool:
        """Whether some rows may never be computed."""
        return self._order is not None

    def __iter__(self) -> Iterator[Part]:
        """Yield the parts, one at least once the count is known to be more than 0."""
        start = 0
        while start < self.count:
            stop = min(start + self.step, self.count)
            yield Part(start, stop, None if self._order is None else self._order[start:stop], stop == self._all)
            start = stop
            self._learn_count()

    def ordered(self, values: Tensor) -> Tensor:
        """Return (..., N) values of the call in the schedule's order."""
        return values if self._order is None else values[..., self._order]

    def in_callers_order(self, results: Results) -> Results:
        """Return results of the computed rows as results of all rows of the call."""
        return results if self._order is None else scattered(results, self._order[: self.count], self._all)

    def _await_count(self, idle: Tensor) -> None:
        number = torch.empty((), dtype=torch.int64, pin_memory=True)
        number.copy_((~idle).sum(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._awaited = event, number

    def _learn_count(self) -> None:
        if self._awaited is None:
            return
        event, number = self._awaited
        event.synchronize()
        self._awaited, self.count = None, int(number)
        if self.count == self._all:
            self._order = None
