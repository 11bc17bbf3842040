"""The three times of a call: loop time, device time and host time.

Loop time is the wall time of an iteration in a loop without synchronisation: the slower one of host and device
determines it, as in a training loop. Device time is from the first to the last kernel of a call, while the host is far
ahead because the device had other work before. A call that synchronises loses that lead, and its waiting counts. Host
time is the time until the call returns, on an idle device.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.devices import Device

__all__ = ["device_seconds", "host_seconds", "loop_seconds"]

# The lead is a multiple of the host time, which is the median for an idle device; behind other work a call may take
# longer. A call that synchronises does not profit from a long lead.
_LEAD_FACTOR, _LEAST_LEAD, _MOST_LEAD = 2.0, 1e-3, 0.05


def loop_seconds(device: Device, iteration: Callable[[], object], iterations: int) -> float:
    """Return the mean wall time of an iteration; synchronise only before the first and after the last."""
    with _no_collection():
        device.wait()
        start = device.now()
        for _ in range(iterations):
            iteration()
        device.wait()
        return (device.now() - start) / iterations


def host_seconds(device: Device, iteration: Callable[[], object], calls: int) -> float:
    """Return the median host time of a call on an idle device."""
    seconds = []
    with _no_collection():
        for _ in range(calls):
            device.wait()
            start = device.now()
            iteration()
            seconds.append(device.now() - start)
        device.wait()
    return statistics.median(seconds)


def device_seconds(
    device: Device, call: Callable[[Any], object], set_up: Callable[[], Any], calls: int, host: float
) -> float:
    """Return the median device time of `call`, without that of `set_up`, for `call(set_up())`.

    `host` is the host time of a call; the device gets more than that of other work before each call.
    """
    marks = []
    with _no_collection():
        for _ in range(calls):
            arguments = set_up()
            device.lead(min(max(_LEAD_FACTOR * host, _LEAST_LEAD), _MOST_LEAD))
            start = device.mark()
            call(arguments)
            marks.append((start, device.mark()))
            del arguments
        device.wait()
    return statistics.median(device.elapsed(*pair) for pair in marks)


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
