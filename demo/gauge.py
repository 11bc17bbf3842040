"""The peak memory of this process between two moments, on every device that can tell."""

import contextlib
import re
import sys
from pathlib import Path

import torch

__all__ = ["Gauge", "make_gauge"]

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What Linux wants to read in `clear_refs` to bring the peak resident set back to the present one (man 5 proc)."""


class Gauge:
    """Where the system cannot tell: every peak is None. The other gauges fill in the two private methods."""

    def __init__(self) -> None:
        self._before: int | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._forget()
        self._before = self._highest()

    def peak(self) -> int | None:
        """Bytes needed since `start`, at the peak, beyond what was alive then."""
        after = self._highest()
        return None if after is None or self._before is None else after - self._before

    def _forget(self) -> None:
        """Bring the peak so far down to what is alive now.

        Where that is not possible the peak of the past stands for what is alive, and `peak` may say too little.
        """

    def _highest(self) -> int | None:
        """Return the peak so far in bytes."""
        return None


class AcceleratorGauge(Gauge):
    """Bytes of tensors on the accelerator, from the counters of torch's allocator.

    A torch that does not count on this accelerator says 0.
    """

    def _forget(self) -> None:
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()

    def _highest(self) -> int | None:
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated() or None


class LinuxGauge(Gauge):
    """Bytes resident in main memory, from the kernel's own high-water mark."""

    def _forget(self) -> None:
        with contextlib.suppress(OSError):  # not every container lets a process do this
            CLEAR_REFS.write_text(RESET_PEAK)

    def _highest(self) -> int | None:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None


class UnixGauge(Gauge):
    """Bytes resident in main memory at the peak since the process began, where there is no /proc, as on macOS."""

    def _highest(self) -> int | None:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def make_gauge(device: torch.device) -> Gauge:
    """Return the gauge that fits the device and the operating system."""
    if device.type != "cpu":
        counted = hasattr(torch.accelerator, "max_memory_allocated")  # since torch 2.9
        return AcceleratorGauge() if counted else Gauge()
    if STATUS.exists():
        return LinuxGauge()
    return Gauge() if sys.platform == "win32" else UnixGauge()
