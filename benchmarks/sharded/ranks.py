"""Clocks that start at the same time on all ranks; otherwise the waiting time in the first collective would count."""

from __future__ import annotations

import os
from collections.abc import Callable
from subprocess import DEVNULL, CalledProcessError, check_output
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.devices import DEVICES, Device
from benchmarks.gpu.clock import loop_seconds
from benchmarks.gpu.facts import gpu_facts

__all__ = ["Together", "most", "rank_facts"]

_MESSAGE, _ITERATIONS = 2**25, 20
_VARIABLES = ("NCCL_NVLS_ENABLE", "NCCL_ALGO", "NCCL_PROTO", "CUDA_DEVICE_MAX_CONNECTIONS")


class Together:
    """A device of this rank that synchronises with all ranks; see `benchmarks.devices.Device`."""

    def __init__(self, kind: str) -> None:
        """Allocate a number to send."""
        self._device: Device = DEVICES[kind]()
        self._one = torch.zeros(1, device=kind)
        self.now, self.mark, self.elapsed = self._device.now, self._device.mark, self._device.elapsed

    def wait(self) -> None:
        """Wait until the devices of all ranks have finished their work."""
        self._device.wait()
        dist.all_reduce(self._one)
        self._device.wait()

    def peak(self, call: Callable[[], None]) -> int | None:
        """Make the call; return this rank's peak."""
        return self._device.peak(call)

    def lead(self, seconds: float) -> None:
        """Give the device work, followed by a barrier of all ranks' devices."""
        self._device.lead(seconds)
        dist.all_reduce(self._one)


def most(value: float, device: str) -> float:
    """Return the largest value of all ranks, so that all ranks make the same decision."""
    values = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return float(values)


def rank_facts(kind: str, device: Device) -> dict[str, Any]:
    """Return facts of the device, the link between the first two, and the times of collectives without overlap."""
    facts = gpu_facts(kind)
    facts |= {"ranks": dist.get_world_size(), "process_group": dist.get_backend()}
    large = torch.zeros(_MESSAGE if kind == "cuda" else 2**12, dtype=torch.bfloat16, device=kind)
    small = torch.zeros(3, 1024, device=kind)
    parts = [torch.empty_like(small) for _ in range(dist.get_world_size())]
    for name, collective in (
        (f"all-reduce of {large.nbytes} bytes", lambda: dist.all_reduce(large)),
        (f"all-gather of {small.nbytes} bytes a rank", lambda: dist.all_gather(parts, small)),
    ):
        collective()
        facts[f"seconds of an {name}"] = loop_seconds(device, collective, _ITERATIONS)
    if kind == "cuda":
        from torch.cuda import nccl

        facts["gpu"] = f"{dist.get_world_size()} x {facts['gpu']}"
        facts["versions"]["nccl"] = ".".join(map(str, nccl.version()))
        facts["link"] = _link()
        facts["environment"] = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return facts


def _link() -> str | None:
    """Return nvidia-smi's name of the link between GPU 0 and GPU 1, for example NV18, or None."""
    try:
        lines = check_output(["nvidia-smi", "topo", "-m"], text=True, stderr=DEVNULL).splitlines()
        return next(line.split()[2] for line in lines if line.startswith("GPU0"))
    except (OSError, CalledProcessError, StopIteration, IndexError):
        return None
