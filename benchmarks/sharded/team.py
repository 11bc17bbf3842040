"""The processes of all ranks as one: all get the same request, and the largest number of their replies is returned.

If a rank fails, others may wait for it in a collective forever, or a later collective could match an earlier one. So
all processes are ended, unless all of them report that a contender is absent.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.process import NotMeasured, Process
from benchmarks.protocol import Join, Request

__all__ = ["Team"]

_JOIN_SECONDS, _PATIENCE = 180.0, 10.0
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
_CPU = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class Team:
    """One process per rank."""

    def __init__(self, device: str, ranks: int, environment: dict[str, str] | None = None) -> None:
        """Start the processes and let them form a group; NotMeasured if they cannot."""
        usual = _NO_MULTICAST | (_CPU if device == "cpu" else {})
        additions = {name: os.environ.get(name, value) for name, value in usual.items()} | (environment or {})
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            self._processes = [
                stack.enter_context(Process("benchmarks.sharded.worker", additions)) for _ in range(ranks)
            ]
            self._threads = stack.enter_context(ThreadPoolExecutor(ranks))
            stack.callback(self._end)
            meeting = str(Path(folder) / "meeting")
            self._ask([Join(device, rank, ranks, meeting) for rank in range(ranks)], _JOIN_SECONDS)
            self._stack = stack.pop_all()

    @property
    def runs(self) -> bool:
        """Whether no process has ended."""
        return all(process.runs for process in self._processes)

    def ask(self, request: Request, seconds: float | None = None) -> dict[str, Any]:
        """Return the first rank's reply, with the largest of all ranks' numbers; NotMeasured if a rank has none."""
        replies = self._ask([request] * len(self._processes), seconds)
        return {key: _largest([reply[key] for reply in replies]) for key in replies[0]}

    def _ask(self, requests: Sequence[Request], seconds: float | None) -> list[dict[str, Any]]:
        pairs = zip(self._processes, requests, strict=True)
        futures = [self._threads.submit(process.ask, request, seconds) for process, request in pairs]
        wait(futures, return_when=FIRST_EXCEPTION)
        failures = _failures(futures)
        if not failures:
            return [future.result() for future in futures]
        wait(futures, timeout=_PATIENCE)
        late = _failures(futures)
        if len(late) < len(futures) or any(failure.status != "absent" for failure in late.values()):
            self._end()
        rank, failure = next(iter(failures.items()))
        raise NotMeasured(failure.status, str(failure) if failure.status == "absent" else f"rank {rank}: {failure}")

    def _end(self) -> None:
        for process in self._processes:
            process.end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the processes."""
        self._stack.close()


def _failures(futures: Sequence[Future[dict[str, Any]]]) -> dict[int, NotMeasured]:
    """Return the failure of each rank that has no reply."""
    errors = {rank: future.exception() for rank, future in enumerate(futures) if future.done()}
    return {rank: error for rank, error in errors.items() if isinstance(error, NotMeasured)}


def _largest(values: list[Any]) -> Any:
    numbers = all(isinstance(value, int | float) for value in values)
    return max(values) if numbers else None if None in values else values[0]
