"""How much of the machine other processes took while something was timed: what decides whether to believe a ratio.

Pairs cancel what slows both members alike. Competition for cores does not slow them alike: whoever lets all threads
meet more often waits more often for one that has no core, so on a busy machine a ratio is biased and not only noisy.
"""

from __future__ import annotations

import os
import time

import psutil

__all__ = ["Disturbance"]


class Disturbance:
    """A span of time that begins with construction."""

    def __init__(self) -> None:
        self._wall, self._own, self._busy = time.perf_counter(), time.process_time(), _busy_seconds()

    def share(self) -> float:
        """Return the share of all cores' time that other processes, or a hypervisor, have taken since the beginning."""
        own, busy = time.process_time() - self._own, _busy_seconds() - self._busy
        available = (time.perf_counter() - self._wall) * (os.cpu_count() or 1)
        return max(0.0, busy - own) / available


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    not_busy = ("idle", "iowait")
    counted_twice = ("guest", "guest_nice")
    return float(sum(times)) - sum(getattr(times, name, 0.0) for name in not_busy + counted_twice)
