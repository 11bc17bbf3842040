"""Peak memory of one call: resident memory on the CPU, what the caching allocator has handed out on a CUDA device.

Resident memory is seen by the operating system, so that no allocator can hide anything from it. Linux lets a process
reset its own high-water mark, which makes the peak of a single call exact. Elsewhere the mark only ever rises: the peak
is known unless something before the call had risen higher, and then it is reported as unknown rather than as a number
that is too small.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["allocated_peak", "resident_peak"]

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_HIGH_WATER_MARK = "5"


def resident_peak(call: Callable[[], None]) -> int | None:
    """Make the call and return its peak of resident bytes above those at its start; None where the system cannot tell.

    Memory that the call touches first is what counts: make the inputs and write to them beforehand.
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


def allocated_peak(call: Callable[[], None]) -> int:
    """Make the call and return the most bytes that PyTorch's CUDA allocator had handed out, above those at its start.

    What the allocator keeps in reserve does not count; the workspace that cuBLAS keeps from its first product on was
    taken before, if the call has been made before.
    """
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - start


def _give_back_free_memory() -> None:
    """Let glibc return what it keeps of freed memory, which the call would reuse without being charged for it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _linux_high_water() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no VmHWM line")


def _peak_of_rising_mark(call: Callable[[], None]) -> int | None:
    import psutil

    mark = _high_water()
    start = int(psutil.Process().memory_info().rss)
    call()
    peak = _high_water()
    return peak - start if peak > mark else None


def _high_water() -> int:
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
