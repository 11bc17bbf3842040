"""The process of one rank, `python -m benchmarks.sharded.worker`; see `benchmarks.protocol` for its requests.

An error is sent as a reply. Other ranks may then wait in a collective, so `benchmarks.sharded.team` ends all of them.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Absent
from benchmarks.protocol import Describe, Join, OpenCase, Prepare, Request, Turn
from benchmarks.serve import serve
from benchmarks.sharded.ranks import Together, rank_facts
from benchmarks.sharded.session import Session

__all__ = ["main"]

_PATIENCE = timedelta(seconds=120)


class _Worker:
    def __init__(self) -> None:
        self._device: Together | None = None
        self._session: Session | None = None

    def answer(self, request: Request) -> dict[str, Any]:
        """Reply to one request; an exception becomes a reply too."""
        try:
            return self._answer(request)
        except Absent as reason:
            return {"absent": str(reason)}
        except torch.OutOfMemoryError as error:
            return {"skipped": "does not fit into the device's memory: " + str(error).partition(". GPU")[0]}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _answer(self, request: Request) -> dict[str, Any]:
        if isinstance(request, Join):
            self._device = _join(request)
            return {}
        if self._device is None:
            raise RuntimeError("the first request must be Join")
        match request:
            case Describe(device=kind):
                return rank_facts(kind, self._device)
            case OpenCase(case=case):
                self._session = None
                self._session = Session(case, self._device)
                return {}
            case Prepare(contender=name):
                return self._open_session().prepare(name)
            case Turn(contender=name, iterations=iterations, calls=calls):
                return self._open_session().turn(name, iterations, calls)
            case _:
                raise TypeError(f"the process of a rank cannot answer {request!r}")

    def _open_session(self) -> Session:
        if self._session is None:
            raise RuntimeError("the first request about a contender must come after OpenCase")
        return self._session


def _join(request: Join) -> Together:
    """Join the process group, with one GPU per rank."""
    own: dict[str, Any] = {}
    if request.device == "cuda":
        if torch.cuda.device_count() < request.ranks:
            raise RuntimeError(f"{request.ranks} ranks want a GPU each, and PyTorch sees {torch.cuda.device_count()}")
        torch.cuda.set_device(request.rank)
        own["device_id"] = torch.device("cuda", request.rank)
    dist.init_process_group(
        "nccl" if request.device == "cuda" else "gloo",
        init_method=f"file://{request.meeting}",
        rank=request.rank,
        world_size=request.ranks,
        timeout=_PATIENCE,
        **own,
    )
    return Together(request.device)


def main() -> None:
    """Answer requests until stdin ends."""
    serve(_Worker().answer)
    os._exit(0)  # skip destructors, which could wait for other ranks


if __name__ == "__main__":
    main()
