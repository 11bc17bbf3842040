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
from typing import Any, Protocol

from benchmarks.memory import resident_peak

__all__ = ["DEVICES", "Cpu", "Cuda", "Device", "default_device"]

_LEAD_BYTES = 512 * 2**20


class Device(Protocol):
    """A device that executes a queue of work, which the host fills. It may be the host itself."""

    def now(self) -> float:
        """Return the host's time in seconds."""

    def wait(self) -> None:
        """Wait until all work of the device is done."""

    def mark(self) -> Any:
        """Record an event after the work in the queue."""

    def elapsed(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks, after `wait`."""

    def lead(self, seconds: float) -> None:
        """Give the device work for at least this many seconds, which also clears the inputs from its caches."""

    def peak(self, call: Callable[[], None]) -> int | None:
        """Make the call; return the peak bytes above those before it, or None if unknown."""

    def most(self, value: float) -> float:
        """Return the largest value of all ranks, so that they make the same decision."""


class Cpu:
    """The host itself: its work is done when a call returns."""

    now = staticmethod(time.perf_counter)
    mark = staticmethod(time.perf_counter)
    peak = staticmethod(resident_peak)
    most = staticmethod(float)

    def wait(self) -> None:
        """Return at once."""

    def elapsed(self, start: float, end: float) -> float:
        """Return their difference."""
        return end - start

    def lead(self, seconds: float) -> None:
        """Do nothing: the host cannot run ahead of itself."""


class Cuda:
    """An NVIDIA GPU through PyTorch. `lead` overwrites a buffer repeatedly."""

    now = staticmethod(time.perf_counter)
    most = staticmethod(float)

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


DEVICES: dict[str, Callable[[], Device]] = {"cpu": Cpu, "cuda": Cuda}


def default_device() -> str:
    """Return the default device: "cuda" if the system shows an NVIDIA GPU, otherwise "cpu".

    This does not load a framework, so that the process of the command line stays small.
    """
    shown = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() or shutil.which("nvidia-smi") is not None
    return "cuda" if shown else "cpu"
