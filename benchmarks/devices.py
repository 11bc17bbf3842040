"""How a device is waited for and how its peak memory is taken: the two things that a measurement asks of a device.

Everything else works alike wherever the tensors lie, so measuring on another device takes one more entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.memory import resident_peak

__all__ = ["DEVICES", "Device"]


@dataclass(frozen=True)
class Device:
    """`wait` returns once all work given to the device is done.

    `peak` makes a call and returns the bytes taken at its peak above those taken before it, or None if unknown.
    """

    wait: Callable[[], None]
    peak: Callable[[Callable[[], None]], int | None]


def _nothing_to_wait_for() -> None:
    """Return: operations on the CPU are complete when they return."""


DEVICES: dict[str, Device] = {"cpu": Device(_nothing_to_wait_for, resident_peak)}
