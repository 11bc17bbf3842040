"""The work of a rank: open a case, prepare contenders, run their turns, in step with all other ranks.

It is like `benchmarks.gpu.session`, but times that decide on a number of calls are agreed on by all ranks. A contender
with wrong results is not timed.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.contenders import Contender, LossFunction, find_contender
from benchmarks.devices import Device
from benchmarks.gpu.clock import device_seconds, host_seconds, loop_seconds
from benchmarks.sharded.ranks import most
from benchmarks.sharded.shards import RankShards

__all__ = ["Session", "Wrong"]

_HOST_SECONDS, _HOST_CALLS = 0.1, (4, 30)
_LIMITS = {"loss_error": 0.02, "input_gradient_error": 0.05, "weight_gradient_error": 0.05}
"""The allowed error: far above that of bfloat16, far below that of a missing collective."""


class Wrong(Exception):
    """A contender has a wrong loss or gradient."""


@dataclass
class _Prepared:
    contender: Contender
    step: LossFunction
    host: float = 0.0


class Session:
    """One case on one rank."""

    def __init__(self, case: Case, device: Device) -> None:
        """Create the inputs and the truth."""
        gc.unfreeze()
        self.case, self.device = case, device
        self.prepared: dict[str, _Prepared] = {}
        self.shards = RankShards(case)
        self.free()

    def prepare(self, name: str) -> dict[str, Any]:
        """Warm up one contender; return the reply of `benchmarks.protocol.Prepare`."""
        contender = find_contender(self.case.function, name)
        prepared = _Prepared(contender, contender.make(self.case))
        start = self.device.now()
        self._iterate(prepared)
        self.device.wait()
        reply: dict[str, Any] = {"first_call_seconds": self.device.now() - start}
        self._iterate(prepared)
        if contender.kind != "floor":
            reply |= self._peak_and_errors(prepared)
        self.prepared[name] = prepared
        self.free()
        call_seconds = most(loop_seconds(self.device, lambda: self._iterate(prepared), 2), self.case.device)
        fewest, largest = _HOST_CALLS
        calls = min(max(math.ceil(_HOST_SECONDS / call_seconds), fewest), largest)
        prepared.host = most(host_seconds(self.device, lambda: self._iterate(prepared), calls), self.case.device)
        start = self.device.now()
        self.turn(name, 1, 1)
        seconds = self.device.now() - start
        return reply | {"host": prepared.host, "call_seconds": call_seconds, "turn_seconds": seconds}

    def turn(self, name: str, iterations: int, calls: int) -> dict[str, float]:
        """Run one contender: an untimed call, a loop, and calls timed on the device. Return the seconds of one call."""
        prepared = self.prepared[name]
        self._iterate(prepared)
        loop = loop_seconds(self.device, lambda: self._iterate(prepared), iterations)
        seconds = device_seconds(self.device, prepared.step, self._set_up, calls, prepared.host)
        self.shards.clear()
        return {"loop": loop, "seconds": seconds}

    def free(self) -> None:
        """Drop gradients and the allocator's cache; freeze existing objects for the garbage collector."""
        self.shards.clear()
        gc.collect()
        gc.freeze()
        if self.case.device == "cuda":
            torch.cuda.empty_cache()

    def _set_up(self) -> RankShards:
        self.shards.clear()
        return self.shards

    def _iterate(self, prepared: _Prepared) -> Tensor | None:
        loss: Tensor | None = prepared.step(self._set_up())
        return loss

    def _peak_and_errors(self, prepared: _Prepared) -> dict[str, Any]:
        losses: list[Tensor] = []
        shards = self._set_up()
        reply: dict[str, Any] = {"peak_bytes": self.device.peak(lambda: losses.append(prepared.step(shards)))}
        reply["loss"] = float(losses[0])
        errors = {name: most(error, self.case.device) for name, error in shards.errors(reply["loss"]).items()}
        for name, error in errors.items():
            if not error <= _LIMITS[name]:
                raise Wrong(f"{name.replace('_', ' ')} of {error:.2g}, at most {_LIMITS[name]:g} is right")
        return reply | errors
