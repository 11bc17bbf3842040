"""How long the work of a call takes on its device, from its first kernel to its last, as it would in a training step.

There the host runs ahead of a GPU. So before every timed call comes work that nobody times: fresh inputs, and memory
that is written over, which also leaves nothing of the inputs in the caches. Whoever waits for the GPU in the middle of
a call gives up that lead, and is charged for it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Clock"]

_LEAD_BYTES = 512 * 2**20
_LEAD_PASSES = 8


class Clock:
    """A clock of one device; events on a GPU, the host's clock elsewhere, where the two are the same."""

    def __init__(self, device: str) -> None:
        """Take the memory that is written over."""
        self._device = device
        self._lead = torch.empty(_LEAD_BYTES if device == "cuda" else 0, dtype=torch.uint8, device=device)

    def time(self, call: Callable[[Any], object], set_up: Callable[[], Any], calls: int) -> list[float]:
        """Return the seconds that each of `calls` times `call(set_up())` took; only `call` is timed."""
        gc.collect()
        gc.disable()
        try:
            return self._events(call, set_up, calls) if self._device == "cuda" else self._host(call, set_up, calls)
        finally:
            gc.enable()

    def _events(self, call: Callable[[Any], object], set_up: Callable[[], Any], calls: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for start, end in pairs:
            arguments = set_up()
            for _ in range(_LEAD_PASSES):
                self._lead.zero_()
            start.record()
            call(arguments)
            end.record()
            del arguments
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs]

    def _host(self, call: Callable[[Any], object], set_up: Callable[[], Any], calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            arguments = set_up()
            start = time.perf_counter()
            call(arguments)
            seconds.append(time.perf_counter() - start)
            del arguments
        return seconds
