"""The parts of a call: which rows are computed, in which order, and how many at a time.

Rows that need no work are skipped. The number of remaining rows must be known before a matrix product starts. On the
CPU the host reads it from memory. On CUDA the number is on the device: the rows to compute are moved to the front, the
first part starts without the number, and the host waits for it before the second part, while the device computes the
first. A call with a single part, in a CUDA graph or in a compiled graph, computes all rows and does not wait.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from xent.backends.torch.contract import Part, Steps

__all__ = ["Schedule"]


class Schedule:
    """The rows of a call in the order of computation, in parts of `step` rows."""

    def __init__(self, steps: Steps, count: int, step: int, skips: bool) -> None:
        """`skips`: whether rows that need no work may be left out, for which the host may have to wait."""
        self.step, self._steps, self._all = max(step, 1), steps, count
        self._order, number = steps.partition(count > step) if skips else (None, count)
        self._awaited: tuple[Tensor, torch.cuda.Event] | None = None
        self.count: int = count
        """The number of rows to compute; an upper bound until the host knows it."""
        if isinstance(number, Tensor):
            on_host = torch.empty((), dtype=torch.int64, pin_memory=True)
            on_host.copy_(number, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._awaited = on_host, event
        else:
            self.count = number

    @property
    def rows(self) -> int:
        """The number of rows of the largest part."""
        return max(min(self.step, self.count), 0)

    @property
    def chunks(self) -> int:
        """The number of parts; an upper bound until the host knows it."""
        return -(-self.count // self.step)

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
            self._learn()

    def _learn(self) -> None:
        """Wait for the number of rows to compute, if its copy to the host was started."""
        if self._awaited is None:
            return
        on_host, event = self._awaited
        event.synchronize()
        self.count, self._awaited = int(on_host), None
        self._steps.learn(self.count)
        if self.count == self._all:
            self._order = None  # all rows in the call's order, because the partition is stable
