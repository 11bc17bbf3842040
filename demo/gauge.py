"""Measure the peak memory of this process between two moments, on all devices that can report it."""

import contextlib
import re
import sys
from pathlib import Path

import torch

__all__ = ["Gauge", "make_gauge"]

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Writing this to `clear_refs` resets the peak resident set on Linux to the present one (man 5 proc)."""


class Gauge:
    """The gauge for systems that cannot report memory: every peak is None. Subclasses implement the private methods."""

    def __init__(self) -> None:
        self._before: int | None = None

    def start(self) -> None:
        """Start a measurement."""
        self._forget()
        self._before = self._highest()

    def peak(self) -> int | None:
        """Return the peak since `start` in bytes, above the memory in use at `start`."""
        after = self._highest()
        return None if after is None or self._before is None else after - self._before

    def _forget(self) -> None:
        """Reset the peak to the memory in use now.

        If the system does not allow this, an earlier peak is used as the baseline, and `peak` may be too small.
        """

    def _highest(self) -> int | None:
        """Return the peak so far in bytes."""
        return None


class AcceleratorGauge(Gauge):
    """Bytes of tensors on the accelerator, from the counters of PyTorch's allocator.

    The result is 0 if PyTorch does not count memory on this accelerator.
    """

    def _forget(self) -> None:
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()

    def _highest(self) -> int | None:
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated() or None


class LinuxGauge(Gauge):
    """Bytes resident in main memory, from the kernel's high-water mark."""

    def _forget(self) -> None:
        with contextlib.suppress(OSError):  # some containers do not allow this
            CLEAR_REFS.write_text(RESET_PEAK)

    def _highest(self) -> int | None:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None


class UnixGauge(Gauge):
    """Peak resident bytes since the start of the process, for systems without /proc, such as macOS."""

    def _highest(self) -> int | None:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def make_gauge(device: torch.device) -> Gauge:
    """Return the gauge for the device and the operating system."""
    if device.type != "cpu":
        counted = hasattr(torch.accelerator, "max_memory_allocated")  # since torch 2.9
        return AcceleratorGauge() if counted else Gauge()
    if STATUS.exists():
        return LinuxGauge()
    return Gauge() if sys.platform == "win32" else UnixGauge()
