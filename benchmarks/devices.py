"""What a measurement asks of a device: the time, to wait for it, to mark a point of its work, and a peak of memory.

Everything else works alike wherever the tensors lie, so measuring on another device takes one more class here, and a
test can stand in for one (`tests/torch/test_benchmarks.py`).
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.memory import allocated_peak, resident_peak

__all__ = ["DEVICES", "Cpu", "Cuda", "Device", "default_device"]

_LEAD_BYTES = 512 * 2**20


class Device(Protocol):
    """A device that works through a queue, which the host fills; the two need not be apart."""

    def now(self) -> float:
        """Return the host's time in seconds."""

    def wait(self) -> None:
        """Return once all work given to the device is done."""

    def mark(self) -> Any:
        """Put a mark behind the work that is in the queue."""

    def elapsed(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks, after `wait`."""

    def lead(self, seconds: float) -> None:
        """Give the device work for at least so long, which leaves nothing of the inputs in its caches."""

    def peak(self, call: Callable[[], None]) -> int | None:
        """Make the call; return the bytes at its peak above those before it, or None if unknown."""


class Cpu:
    """The host itself: its work is done when a call returns."""

    now = staticmethod(time.perf_counter)
    mark = staticmethod(time.perf_counter)
    peak = staticmethod(resident_peak)

    def wait(self) -> None:
        """Return at once."""

    def elapsed(self, start: float, end: float) -> float:
        """Return their difference."""
        return end - start

    def lead(self, seconds: float) -> None:
        """Do nothing: nobody runs ahead."""


class Cuda:
    """An NVIDIA GPU by way of PyTorch; its lead is memory that is written over, so many times as take so long."""

    now = staticmethod(time.perf_counter)
    peak = staticmethod(allocated_peak)

    def __init__(self) -> None:
        """Take the memory, and time one pass over it."""
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
        """Write the memory over, once at least."""
        for _ in range(math.ceil(seconds / self._pass_seconds)):
            self._memory.zero_()


DEVICES: dict[str, Callable[[], Device]] = {"cpu": Cpu, "cuda": Cuda}


def default_device() -> str:
    """Name the device to measure on unless the user names one: "cuda" where the system shows an NVIDIA GPU, else "cpu".

    No framework is loaded to find out, so that the process of the command line stays small.
    """
    shown = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() or shutil.which("nvidia-smi") is not None
    return "cuda" if shown else "cpu"
