"""The three times of a call: in a loop, on the device, and on the host.

Loop: the wall time of an iteration when nothing waits between iterations, so whichever of host and device is slower
shows; it is what a training loop sees. Device: from the first kernel to the last while the host is far ahead, behind
work that nobody times. Whoever waits for the device in the middle of a call gives up that lead, and is charged for it.
Host: until the call returns, when the device had nothing to do before it.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.devices import Device

__all__ = ["device_seconds", "host_seconds", "loop_seconds"]

# The host's time is the median of an idle call; one behind other work may take longer. A call that waits for the device
# has no use for a long lead.
_LEAD_FACTOR, _LEAST_LEAD, _MOST_LEAD = 2.0, 1e-3, 0.05


def loop_seconds(device: Device, iteration: Callable[[], object], iterations: int) -> float:
    """Return the mean wall time of an iteration; the device is waited for once before and once behind all of them."""
    with _no_collection():
        device.wait()
        start = device.now()
        for _ in range(iterations):
            iteration()
        device.wait()
        return (device.now() - start) / iterations


def host_seconds(device: Device, iteration: Callable[[], object], calls: int) -> float:
    """Return the median time of the host for one call on an idle device."""
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
    """Return the median time of `call(set_up())` on the device, of which only `call` is timed.

    `host`: how long the host takes for a call; the device has more than that to do before each.
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
