"""A device for measurements: clock, synchronisation, events, and peak memory.

All other code is the same for every device. Tests use a simulated one.
"""

from __future__ import annotations

import gc
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.memory import resident_peak

__all__ = ["DEVICES", "Cuda", "Device", "default_device"]

_LEAD_BYTES = 512 * 2**20


class Device:
    """The host itself: its work is done when a call returns. Other devices have a queue of work, which it fills."""

    now = staticmethod(time.perf_counter)

    def wait(self) -> None:
        """Wait until all work of the device is done."""

    def mark(self) -> Any:
        """Record an event after the work in the queue."""
        return self.now()

    def elapsed(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks, after `wait`."""
        return float(end - start)

    def lead(self, seconds: float) -> None:
        """Give the device work for at least this many seconds, which also clears the inputs from its caches."""

    def peak(self, call: Callable[[], None]) -> int | None:
        """Make the call; return the peak bytes above those before it, or None if unknown."""
        return resident_peak(call)

    def most(self, value: float) -> float:
        """Return the largest value of all ranks, so that they make the same decision."""
        return value


class Cuda(Device):
    """An NVIDIA GPU through PyTorch. `lead` overwrites a buffer repeatedly."""

    def __init__(self) -> None:
        """Allocate the buffer, and measure the time of one pass over it."""
        import torch

        self._torch = torch
        self._memory = torch.empty(_LEAD_BYTES, dtype=torch.uint8, device="cuda")
        self._pass_seconds = 1.0
        marks = []
        for _ in range(4):
            self._memory.zero_()
            marks.append(self.mark())
        self.wait()
        self._pass_seconds = min(map(self.elapsed, marks, marks[1:]))

    def wait(self) -> None:
        """Synchronise."""
        self._torch.cuda.synchronize()

    def mark(self) -> Any:
        """Record an event."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, start: Any, end: Any) -> float:
        """Return the seconds between two events."""
        return float(start.elapsed_time(end)) * 1e-3

    def lead(self, seconds: float) -> None:
        """Overwrite the buffer, at least once."""
        for _ in range(math.ceil(seconds / self._pass_seconds)):
            self._memory.zero_()

    def peak(self, call: Callable[[], None]) -> int:
        """Return the peak of bytes that PyTorch's allocator gave out; neither its reserve nor cuBLAS's workspace."""
        cuda = self._torch.cuda
        gc.collect()
        self.wait()
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
        start = cuda.memory_allocated()
        call()
        self.wait()
        return int(cuda.max_memory_allocated() - start)


DEVICES: dict[str, Callable[[], Device]] = {"cpu": Device, "cuda": Cuda}


def default_device() -> str:
    """Return the default device: "cuda" if the system shows an NVIDIA GPU, otherwise "cpu".

    This does not load a framework, so that the process of the command line stays small.
    """
    return "cuda" if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") else "cpu"
