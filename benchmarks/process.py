"""Control a measuring process: start it, send requests, end it, and convert every failure to a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case
from benchmarks.protocol import Open, Request, encode

__all__ = ["NotMeasured", "Process", "WorkerProcess"]

if TYPE_CHECKING:
    from typing_extensions import Self

_ROOT = Path(__file__).resolve().parent.parent


class NotMeasured(Exception):
    """There is no result: `status` is "absent", "failed" or "skipped", and the message is the reason."""

    def __init__(self, status: str, reason: str) -> None:
        """Keep the status beside the message."""
        super().__init__(reason)
        self.status = status


class Process:
    """A running module that answers requests, as `benchmarks.serve` does; a context manager that ends it."""

    def __init__(self, module: str, environment: dict[str, str] | None = None) -> None:
        """Start the process in the root of the repository, with these additional environment variables."""
        self._complaints = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            cwd=_ROOT,
            env={**os.environ, **(environment or {})},
        )

    @property
    def runs(self) -> bool:
        """Whether the process is still running."""
        return self._process.poll() is None

    def ask(self, request: Request, seconds: float | None = None) -> dict[str, Any]:
        """Return the reply to a request; NotMeasured if there is none. After `seconds` the process is ended."""
        self._send(request)
        if seconds is None:
            return self._receive()
        too_late = threading.Event()

        def end() -> None:
            too_late.set()
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            return self._receive()
        except NotMeasured:
            if too_late.is_set():
                raise NotMeasured("failed", f"no answer within {seconds:.0f} s") from None
            raise
        finally:
            timer.cancel()

    def end(self) -> None:
        """End the process, also while it works; a waiting `ask` raises."""
        self._process.kill()
        self._process.wait()

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
        for key, status in (("absent", "absent"), ("skipped", "skipped"), ("error", "failed")):
            if key in reply:
                raise NotMeasured(status, reply[key])
        return reply

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        if code < 0:
            return f"the process was killed by signal {-code}, which is often a lack of memory"
        self._complaints.seek(0)
        lines = self._complaints.read().strip().splitlines()
        return f"the process ended with status {code}: {lines[-1] if lines else 'no message'}"

    def __enter__(self) -> Self:
        """Return self: the process has been running since construction."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._complaints.close()


class WorkerProcess(Process):
    """A running `benchmarks.worker`.

    The constructor sends the first request without waiting for the reply, so that several processes can load their
    framework at the same time. Call `wait_until_ready` before the first `ask`.
    """

    def __init__(self, case: Case, contender: str, threads: int | None) -> None:
        """Start the process and send it the case."""
        bound = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        super().__init__("benchmarks.worker", bound)
        self.threads: int | None = None
        self._send(Open(case, contender, threads))

    def wait_until_ready(self) -> None:
        """Wait until the process has loaded its framework, created its inputs and warmed up; NotMeasured on failure."""
        self.threads = int(self._receive()["threads"])
