"""How a device is waited for and how its peak memory is taken: the two things that a measurement asks of a device.

Everything else works alike wherever the tensors lie, so measuring on another device takes one more entry here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory import allocated_peak, resident_peak

__all__ = ["DEVICES", "Device", "default_device"]


@dataclass(frozen=True)
class Device:
    """`wait` returns once all work given to the device is done.

    `peak` makes a call and returns the bytes taken at its peak above those taken before it, or None if unknown.
    """

    wait: Callable[[], None]
    peak: Callable[[Callable[[], None]], int | None]


def _nothing_to_wait_for() -> None:
    """Return: operations on the CPU are complete when they return."""


def _wait_for_cuda() -> None:
    import torch

    torch.cuda.synchronize()


DEVICES: dict[str, Device] = {
    "cpu": Device(_nothing_to_wait_for, resident_peak),
    "cuda": Device(_wait_for_cuda, allocated_peak),
}


def default_device() -> str:
    """Name the device to measure on unless the user names one: "cuda" where the system shows an NVIDIA GPU, else "cpu".

    No framework is loaded to find out, so that the process of the command line stays small.
    """
    shown = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() or shutil.which("nvidia-smi") is not None
    return "cuda" if shown else "cpu"
