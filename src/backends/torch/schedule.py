"""Which rows `linear_cross_entropy` computes, in which order and how many at a time: ignored rows are left out.

How many rows are left has to be known before a matrix product starts. On the CPU that is a look at memory. On CUDA the
number comes from the device: rows to compute are put first, the first chunk starts without knowing how many there
are, and only before the second does the host wait for the number, while the device has the first chunk to work on and
never idles. Slices of classes ask for all rows at once (`whole`). One chunk alone, or a CUDA graph that is being
captured, computes all rows and waits for nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts
from xent.backends.torch.results import Results, scattered

__all__ = ["Part", "Schedule"]

_STEP_OF_FIRST = 2048


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of the schedule's order."""

    start: int
    stop: int
    rows: Tensor | None
    """(R,) int64, which rows of the call these are; None where they are [start, stop) themselves."""
    last: bool
    """Whether nothing follows for certain."""
    idle: Tensor | None
    """(R,) bool, rows that need not be computed; None where it is known that there are none."""

    def take(self, values: Tensor) -> Tensor:
        """Return these rows of (N, D) values of the call, whatever those hold that need not be computed."""
        return values[self.start : self.stop] if self.rows is None else values[self.rows]

    def put(self, values: Tensor, place: Tensor) -> None:
        """Write (R, ...) values to these rows of (N, ...) `place`."""
        if self.rows is None:
            place[self.start : self.stop] = values
        else:
            place.index_copy_(0, self.rows, values.to(place.dtype))


class Schedule:
    """The rows of a call in the order in which they are computed, `step` at a time but for the `first` of them."""

    def __init__(self, facts: Facts, step: int, computed_first: Callable[[Facts], Any], first: int = 0) -> None:
        """`computed_first` is the step of that name (`xent.backends.torch.steps`), for this device."""
        self.step, self.first, self._all = step, first, len(facts.weight)
        idle = facts.idle
        self._idle: Tensor | None = idle
        self._order: Tensor | None = None
        self._awaited: tuple[torch.cuda.Event, Tensor] | None = None
        self.count = self._all
        """How many rows are computed, as far as is known."""
        if _host_sees(idle):
            self._idle = None
            if bool(idle.any()):
                self._order = idle.argsort(stable=True)
                self.count = int((~idle).sum())
                facts = facts.select(self._order[: self.count])
        elif (
            idle.device.type == "cuda" and (first or self._all > step) and not torch.cuda.is_current_stream_capturing()
        ):
            self._order, number, facts = computed_first(facts)
            self._await_count(number)
        self.facts = facts

    @property
    def left_out(self) -> Tensor | None:
        """Which rows were never computed, (M,) int64; None for none. To be asked after the last part."""
        return None if self._order is None else self._order[self.count :]

    def __iter__(self) -> Iterator[Part]:
        """Yield the parts, one at least once the count is known to be more than 0."""
        start = 0
        while start < self.count:
            stop = min(start + self._step(start), self.count)
            rows = None if self._order is None else self._order[start:stop]
            idle = self._idle
            if idle is not None:
                idle = idle[start:stop] if rows is None else idle[rows]
            yield Part(start, stop, rows, stop == self.count, idle)
            start = stop
            self.learn_count()

    def whole(self) -> Part:
        """Return all rows that are computed as one part. The host waits for their number, where that is on its way."""
        self.learn_count()
        return self.until(self.count)

    def until(self, stop: int) -> Part:
        """Return the first rows that are computed, up to `stop` of them, as one part, once their number is known."""
        stop = min(stop, self.count)
        rows = None if self._order is None else self._order[:stop]
        idle = self._idle
        if idle is not None:
            idle = idle[:stop] if rows is None else idle[rows]
        return Part(0, stop, rows, stop == self.count, idle)

    def chunks(self) -> int:
        """Return how many parts there are after the first rows, as far as is known."""
        return -(-max(self.count - self.first, 0) // self.step)

    def ordered(self, values: Tensor) -> Tensor:
        """Return (..., N) values of the call in the schedule's order."""
        return values if self._order is None else values[..., self._order]

    def in_callers_order(self, results: Results) -> Results:
        """Return results of the computed rows as results of all rows of the call."""
        return results if self._order is None else scattered(results, self._order[: self.count], self._all)

    def _step(self, start: int) -> int:
        return min(self.first - start, _STEP_OF_FIRST) if start < self.first else self.step

    def _await_count(self, number: Tensor) -> None:
        on_host = torch.empty((), dtype=torch.int64, pin_memory=True)
        on_host.copy_(number, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._awaited = event, on_host

    def learn_count(self) -> None:
        """Wait for the number of rows that are computed, if it is on its way."""
        if self._awaited is None:
            return
        event, number = self._awaited
        event.synchronize()
        self._awaited, self._idle, self.count = None, None, int(number)
        if self.count == self._all:
            self._order = None


def _host_sees(tensor: Tensor) -> bool:
    """Whether a look at its values makes nobody wait."""
    return tensor.device.type == "cpu"
