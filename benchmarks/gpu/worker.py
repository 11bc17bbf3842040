"""The process that measures on a GPU, `python -m benchmarks.gpu.worker`; see `benchmarks.protocol` for its requests.

An error that leaves the device unusable ends the process; `benchmarks.gpu.measure` then starts another one.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from benchmarks.contenders import Absent
from benchmarks.devices import DEVICES, Device
from benchmarks.gpu.facts import gpu_facts
from benchmarks.gpu.session import Session
from benchmarks.protocol import Describe, OpenCase, Prepare, Request, Turn
from benchmarks.serve import serve

__all__ = ["main"]

_DEVICE_LOST = 3


class _Worker:
    def __init__(self) -> None:
        self._session: Session | None = None
        self._devices: dict[str, Device] = {}

    def answer(self, request: Request) -> dict[str, Any]:
        """Reply to one request, whatever happens on the way."""
        try:
            return self._answer(request)
        except Absent as reason:
            return {"absent": str(reason)}
        except torch.OutOfMemoryError as error:
            reply = {"skipped": "does not fit into the device's memory: " + str(error).partition(". GPU")[0]}
        except Exception as error:
            self._end_if_device_is_lost(error)
            reply = {"error": f"{type(error).__name__}: {error}"}
        if self._session is not None:
            self._session.free()
        return reply

    def _answer(self, request: Request) -> dict[str, Any]:
        match request:
            case Describe(device=device):
                return gpu_facts(device)
            case OpenCase(case=case):
                self._close()
                if case.device not in self._devices:
                    self._devices[case.device] = DEVICES[case.device]()
                self._session = Session(case, self._devices[case.device])
                return {}
            case Prepare(contender=name):
                return self._open_session().prepare(name)
            case Turn(contender=name, iterations=iterations, calls=calls):
                return self._open_session().turn(name, iterations, calls)
            case _:
                raise TypeError(f"a GPU's worker cannot answer {request!r}")

    def _open_session(self) -> Session:
        if self._session is None:
            raise RuntimeError("the first request about a contender must come after OpenCase")
        return self._session

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.prepared.clear()
            session.truth = None
            session.free()

    def _end_if_device_is_lost(self, error: Exception) -> None:
        if self._session is None:
            return
        try:
            self._session.device.wait()
        except Exception:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr, flush=True)
            os._exit(_DEVICE_LOST)


def main() -> None:
    """Answer requests until stdin ends."""
    serve(_Worker().answer)


if __name__ == "__main__":
    main()
