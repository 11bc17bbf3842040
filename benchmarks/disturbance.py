"""The share of the machine that other processes used during a measurement, to judge whether a ratio is reliable.

A ratio within a pair cancels slowdowns of both members. Competition for cores does not slow both equally: the one that
synchronises its threads more often waits more often for a thread without a core. So on a busy machine a ratio is
biased, not only noisy.
"""

from __future__ import annotations

import os
import time

import psutil

__all__ = ["Disturbance"]


class Disturbance:
    """A measurement that starts with construction."""

    def __init__(self) -> None:
        self._wall, self._own, self._busy = time.perf_counter(), time.process_time(), _busy_seconds()

    def share(self) -> float:
        """Return the share of the time of all cores that other processes, or a hypervisor, used since the start."""
        own, busy = time.process_time() - self._own, _busy_seconds() - self._busy
        available = (time.perf_counter() - self._wall) * (os.cpu_count() or 1)
        return max(0.0, busy - own) / available


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    not_busy = ("idle", "iowait")
    counted_twice = ("guest", "guest_nice")
    return float(sum(times)) - sum(getattr(times, name, 0.0) for name in not_busy + counted_twice)
