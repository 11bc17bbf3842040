"""The driver's side of a measuring process: start it, ask it, end it, and turn every way it can fail into a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.cases import Case
from benchmarks.protocol import Open, Request, encode

__all__ = ["NotMeasured", "WorkerProcess"]

_ROOT = Path(__file__).resolve().parent.parent


class NotMeasured(Exception):
    """There will be no number: `status` is "absent", "failed" or "skipped", the message is the reason."""

    def __init__(self, status: str, reason: str) -> None:
        """Keep the status beside the message."""
        super().__init__(reason)
        self.status = status


class WorkerProcess:
    """A running `benchmarks.worker`; a context manager that ends it.

    Starting sends the first request and does not wait for its reply, so that several can load their framework at once:
    `wait_until_ready` before the first `ask`.
    """

    def __init__(self, case: Case, contender: str, threads: int | None) -> None:
        """Start the process in the root of the repository."""
        environment = dict(os.environ)
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.threads: int | None = None
        self._complaints = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            cwd=_ROOT,
            env=environment,
        )
        self._send(Open(case, contender, threads))

    def wait_until_ready(self) -> None:
        """Return once the process has loaded its framework, made its inputs and warmed up; NotMeasured if it cannot."""
        self.threads = int(self._receive()["threads"])

    def ask(self, request: Request) -> dict[str, Any]:
        """Return the reply to one request; NotMeasured if there is none."""
        self._send(request)
        return self._receive()

    def _send(self, request: Request) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise NotMeasured("failed", self._how_it_ended()) from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise NotMeasured("failed", self._how_it_ended())
        reply: dict[str, Any] = json.loads(line)
        if "absent" in reply:
            raise NotMeasured("absent", reply["absent"])
        if "error" in reply:
            raise NotMeasured("failed", reply["error"])
        return reply

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        if code < 0:
            return f"the process was killed by signal {-code}, which is often a lack of memory"
        self._complaints.seek(0)
        lines = self._complaints.read().strip().splitlines()
        return f"the process ended with status {code}: {lines[-1] if lines else 'no message'}"

    def __enter__(self) -> WorkerProcess:
        """Nothing more to do: the process runs since construction."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._complaints.close()
