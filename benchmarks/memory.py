"""Peak of resident memory of one call.

The operating system reports resident memory, which includes that of all allocators. On Linux a process can reset its
own high-water mark, so the peak of a single call is exact. On other systems the mark only rises. There the peak is
reported as unknown if the mark was higher before the call.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["resident_peak"]

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_HIGH_WATER_MARK = "5"


def resident_peak(call: Callable[[], None]) -> int | None:
    """Make the call and return its peak of resident bytes above those at its start; None if it is unknown.

    Create the inputs and write to them beforehand, because only memory that the call touches first counts.
    """
    gc.collect()
    if sys.platform == "linux":
        _give_back_free_memory()
    try:
        _CLEAR_REFS.write_text(_RESET_HIGH_WATER_MARK)
    except OSError:
        return _peak_of_rising_mark(call)
    start = _linux_high_water()
    call()
    return _linux_high_water() - start


def _give_back_free_memory() -> None:
    """Let glibc return freed memory to the system. Otherwise the call could reuse it without being charged for it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _linux_high_water() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no VmHWM line")


def _peak_of_rising_mark(call: Callable[[], None]) -> int | None:
    import resource

    import psutil

    unit, usage = 1 if sys.platform == "darwin" else 1024, resource.getrusage
    mark, start = usage(resource.RUSAGE_SELF).ru_maxrss, psutil.Process().memory_info().rss
    call()
    peak = usage(resource.RUSAGE_SELF).ru_maxrss
    return peak * unit - start if peak > mark else None
