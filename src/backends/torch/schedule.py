"""The schedule of a linear loss: which rows are computed, in which order, and how many per chunk.

Rows that need no work are skipped. The number of remaining rows must be known before a matrix product starts. On the
CPU the host reads it from memory. On CUDA the number is on the device: the rows to compute are moved to the front, the
first chunk starts without the number, and the host waits for it before the second chunk, while the device computes the
first. A call with a single chunk, or in a CUDA graph, computes all rows and does not wait.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from xent.backends.torch.host_number import HostNumber

__all__ = ["Part", "Schedule"]


class Part(NamedTuple):
    """Rows [start, stop) of the schedule's order."""

    start: int
    stop: int
    rows: Tensor | None
    """(R,) int64, the indices of these rows in the call; None if they are [start, stop)."""
    last: bool
    """Whether this is known to be the last part."""

    @property
    def indices(self) -> slice | Tensor:
        """The indices of these rows in the call."""
        return slice(self.start, self.stop) if self.rows is None else self.rows

    def put(self, values: Tensor, place: Tensor) -> None:
        """Write values (R, ...) to these rows of `place` (N, ...)."""
        if self.rows is None:
            place[self.start : self.stop] = values
        else:
            place.index_copy_(0, self.rows, values.to(place.dtype))


class Schedule:
    """The rows of a job in the order of computation, in parts of `step` rows."""

    def __init__(self, job: Any, step: int) -> None:
        """`job` is a `xent.backends.torch.job.Job`."""
        self.step, self._job = step, job
        self._order, number = job.partition(job.count > step)
        self._awaited: HostNumber | None = None
        self.count: int = job.count
        """The number of rows to compute; an upper bound until the host knows it."""
        if isinstance(number, Tensor):
            self._awaited = HostNumber(number)
        else:
            self.count = number

    @property
    def left_out(self) -> Tensor | None:
        """The indices (M,) int64 of the rows that were skipped, or None. Valid after the last part."""
        return None if self._order is None else self._order[self.count :]

    def __iter__(self) -> Iterator[Part]:
        """Yield the parts; at least one if any row has to be computed."""
        start = 0
        while start < self.count:
            stop = min(start + self.step, self.count)
            rows = None if self._order is None else self._order[start:stop]
            yield Part(start, stop, rows, stop == self.count)
            start = stop
            self._learn_count()

    def chunks(self) -> int:
        """Return the number of parts; an upper bound until the host knows it."""
        return -(-self.count // self.step)

    def _learn_count(self) -> None:
        """Wait for the number of rows to compute, if its copy to the host was started."""
        if self._awaited is None:
            return
        self.count = self._awaited.read_usual(self._job.count)
        self._awaited = None
        self._job.learn(self.count)
        if self.count == self._job.count:
            self._order = None  # all rows in the call's order, because the partition is stable
