"""The process that measures one contender on one case on a CPU, `python -m benchmarks.worker`.

In its own process, each contender has fresh memory, its own allocator and its own thread pools. `benchmarks.protocol`
describes the requests.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy import Truth, compute_truth, gradient_errors
from benchmarks.contenders import Absent, find_contender
from benchmarks.devices import DEVICES
from benchmarks.disturbance import Disturbance
from benchmarks.problems import LinearProblem, make_problem
from benchmarks.protocol import FirstCall, Open, Request, Time, WriteTruth
from benchmarks.serve import serve

__all__ = ["Measurement", "main"]

# Large enough that operations start their threads, small enough not to affect the measured memory.
_WARM_UP_TOKENS, _WARM_UP_HIDDEN, _WARM_UP_VOCABULARY = 64, 64, 2048


class Measurement:
    """One contender, ready to be measured on one case."""

    def __init__(self, order: Open) -> None:
        """Create the contender and the inputs, and warm up the framework."""
        if order.threads is not None:
            torch.set_num_threads(order.threads)
        self.case = order.case
        self.device = DEVICES[self.case.device]()
        self.contender = find_contender(self.case.function, order.contender)
        self.loss = self.contender.make(self.case)
        self.problem = make_problem(self.case)
        if not self.contender.compiles:
            self._warm_up()

    def _warm_up(self) -> None:
        hidden = min(_WARM_UP_HIDDEN, self.case.hidden)
        tiny = replace(self.case, tokens=_WARM_UP_TOKENS, hidden=hidden, vocabulary=_WARM_UP_VOCABULARY)
        problem = make_problem(tiny)
        for _ in range(2):
            problem.call(self.loss, problem.set_up(self.contender.in_place))
        self.device.wait()

    def answer(self, request: Request) -> dict[str, Any]:
        """Execute a request and return the fields of the reply."""
        match request:
            case FirstCall(truth=truth):
                return self._first_call(truth)
            case Time(calls=calls):
                disturbance = Disturbance()
                return {"seconds": self._time(calls), "disturbance": disturbance.share()}
            case WriteTruth(path=path):
                compute_truth(self._linear_problem()).save(Path(path))
                return {}
            case _:
                raise TypeError(f"a measurement cannot answer {request!r}")

    def _first_call(self, truth_path: str | None) -> dict[str, Any]:
        if self.contender.compiles:
            self._time(1)
        arguments = self.problem.set_up(self.contender.in_place)
        losses: list[torch.Tensor] = []

        def call() -> None:
            losses.append(self.problem.call(self.loss, arguments))
            self.device.wait()

        start = time.perf_counter()
        peak = self.device.peak(call)
        seconds = time.perf_counter() - start
        reply: dict[str, Any] = {"peak_bytes": peak, "seconds": seconds, "loss": losses[0].double().item()}
        if truth_path is not None:
            truth = Truth.load(Path(truth_path))
            reply["loss_error"] = abs(reply["loss"] - truth.loss)
            errors = gradient_errors(self._linear_problem(), truth)
            reply["input_gradient_error"], reply["weight_gradient_error"] = errors
        return reply

    def _time(self, calls: int) -> float:
        total = 0.0
        gc.collect()
        gc.disable()
        for _ in range(calls):
            arguments = self.problem.set_up(self.contender.in_place)
            self.device.wait()
            start = time.perf_counter()
            self.problem.call(self.loss, arguments)
            self.device.wait()
            total += time.perf_counter() - start
            del arguments
        gc.enable()
        return total / calls

    def _linear_problem(self) -> LinearProblem:
        if not isinstance(self.problem, LinearProblem):
            raise TypeError(f"only linear cases have a truth in float64, and this is: {self.case.title}")
        return self.problem


def main() -> None:
    """Answer requests until stdin ends."""
    measurement: Measurement | None = None

    def answer(request: Request) -> dict[str, Any]:
        nonlocal measurement
        try:
            if isinstance(request, Open):
                measurement = Measurement(request)
                return {"threads": torch.get_num_threads()}
            if measurement is None:
                raise RuntimeError(f"the first request must be Open, got {request!r}")
            return measurement.answer(request)
        except Absent as reason:
            return {"absent": str(reason)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    serve(answer)


if __name__ == "__main__":
    main()
