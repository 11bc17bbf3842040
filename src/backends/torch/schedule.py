"""Which rows a linear loss computes, in which order and how many at a time: rows that need no work are left out.

How many rows are left has to be known before a matrix product starts. On the CPU that is a look at memory. On CUDA the
number comes from the device: rows to compute are put first, the first chunk starts without knowing how many there
are, and only before the second does the host wait for the number, while the device has the first chunk to work on and
never idles. One chunk alone, or a CUDA graph that is being captured, computes all rows and waits for nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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

    def put(self, values: Tensor, place: Tensor) -> None:
        """Write (R, ...) values to these rows of (N, ...) `place`."""
        if self.rows is None:
            place[self.start : self.stop] = values
        else:
            place.index_copy_(0, self.rows, values.to(place.dtype))


class Schedule:
    """The rows of a job in the order in which they are computed, `step` at a time."""

    def __init__(self, job: Any, step: int) -> None:
        """`job` is a `xent.backends.torch.job.Job`."""
        self.step, self._job = step, job
        self._order, number = job.partition(job.count > step)
        self._awaited: tuple[torch.cuda.Event, Tensor] | None = None
        self.count: int = job.count
        """How many rows are computed, as far as is known."""
        if isinstance(number, Tensor):
            self._await_count(number)
        else:
            self.count = number

    @property
    def left_out(self) -> Tensor | None:
        """Which rows were never computed, (M,) int64; None for none. To be asked after the last part."""
        return None if self._order is None else self._order[self.count :]

    def __iter__(self) -> Iterator[Part]:
        """Yield the parts, one at least once the count is known to be more than 0."""
        start = 0
        while start < self.count:
            stop = min(start + self.step, self.count)
            rows = None if self._order is None else self._order[start:stop]
            yield Part(start, stop, rows, stop == self.count)
            start = stop
            self._learn_count()

    def chunks(self) -> int:
        """Return how many parts there are, as far as is known."""
        return -(-self.count // self.step)

    def _await_count(self, number: Tensor) -> None:
        on_host = torch.empty((), dtype=torch.int64, pin_memory=True)
        on_host.copy_(number, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._awaited = event, on_host

    def _learn_count(self) -> None:
        """Wait for the number of rows that are computed, if it is on its way."""
        if self._awaited is None:
            return
        event, number = self._awaited
        event.synchronize()
        self._awaited, self.count = None, int(number)
        self._job.learn(self.count)
        if self.count == self._job.count:
            self._order = None  # it is the call's: the partition is stable
