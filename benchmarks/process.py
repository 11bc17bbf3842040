"""Processes that measure: an object in each of them, whose methods the command line calls.

A process of its own has fresh memory, allocators, thread pools and environment variables, and may crash without harm.
Several processes, the ranks of a process group, act as one: each gets every call, and the largest number counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, get_context
from typing import TYPE_CHECKING, Any

__all__ = ["Absent", "NotMeasured", "Team"]

if TYPE_CHECKING:
    from typing_extensions import Self

_STATUS = {"lost": "failed"}  # the device cannot be used again, and the process has ended


class NotMeasured(Exception):
    """There is no result: `status` is "absent", "failed" or "skipped", and the message is the reason."""

    def __init__(self, status: str, reason: str) -> None:
        """Keep the status beside the message."""
        super().__init__(reason)
        self.status = status


class Absent(NotMeasured):
    """A contender that this machine cannot run."""

    def __init__(self, reason: str) -> None:
        """Keep the reason."""
        super().__init__("absent", reason)


class Team:
    """One process for each element of `ranks`, which are the arguments of `make`; a context manager that ends them."""

    def __init__(
        self, make: Callable[..., Any], ranks: Sequence[tuple[Any, ...]], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the processes with these additional environment variables. The first call makes the objects."""
        context, before = get_context("spawn"), dict(os.environ)
        self._pipes: list[connection.Connection] = []
        self._processes = []
        os.environ.update(environment or {})
        try:
            for arguments in ranks:
                mine, other = context.Pipe()
                process = context.Process(target=_serve, args=(other, make, arguments), daemon=True)
                process.start()
                other.close()
                self._pipes.append(mine)
                self._processes.append(process)
        finally:
            os.environ.clear()
            os.environ.update(before)

    @property
    def runs(self) -> bool:
        """Whether no process has ended."""
        return all(process.is_alive() for process in self._processes)

    def ask(self, method: str, *arguments: Any, seconds: float | None = None) -> dict[str, Any]:
        """Return the reply of a method, with the largest of all ranks' numbers; NotMeasured if a rank has none.

        The processes are ended if there is no reply within `seconds`, or if ranks may wait for each other forever:
        if one of several fails, unless all of them say that a contender is absent.
        """
        for pipe in self._pipes:
            try:
                pipe.send((method, arguments))
            except OSError:
                raise self._ended() from None
        end = None if seconds is None else time.monotonic() + seconds
        replies: dict[int, dict[str, Any]] = {}
        failures: dict[int, NotMeasured] = {}
        while len(replies) + len(failures) < len(self._pipes):
            left = [rank for rank in range(len(self._pipes)) if rank not in replies and rank not in failures]
            pipes = {self._pipes[rank]: rank for rank in left}
            ready = connection.wait(list(pipes), None if end is None else max(0.0, end - time.monotonic()))
            if not ready:
                self.end()
                raise NotMeasured("failed", f"no answer within {seconds:.0f} s")
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    status, value = self._pipes[rank].recv()
                except EOFError:
                    raise self._ended() from None
                if status == "reply":
                    replies[rank] = value
                    continue
                alone = len(self._pipes) == 1
                failures[rank] = NotMeasured(_STATUS.get(status, status), value)
                if status == "lost" or (status != "absent" and not alone):
                    self.end()
                    raise failures[rank]
        if failures:
            if replies:
                self.end()
            raise next(iter(failures.values()))
        return {name: _largest([reply[name] for reply in replies.values()]) for name in replies[0]}

    def _ended(self) -> NotMeasured:
        self.end()
        codes = ", ".join(str(process.exitcode) for process in self._processes)
        return NotMeasured("failed", f"the process ended with status {codes}; -9 is often a lack of memory")

    def end(self) -> None:
        """End the processes, also while they work."""
        for process in self._processes:
            process.join(0.1)
            process.kill()
            process.join()

    def __enter__(self) -> Self:
        """Return self: the processes have been running since construction."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        self.end()


def _largest(values: list[Any]) -> Any:
    if all(isinstance(value, int | float) for value in values):
        return max(values)
    return None if None in values else values[0]


def _serve(pipe: connection.Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Answer calls until the pipe is closed. What libraries print goes to stderr."""
    os.dup2(2, 1)
    worker: Any = None
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            os._exit(0)  # without destructors, which could wait for other ranks
        try:
            worker = make(*arguments) if worker is None else worker
            pipe.send(("reply", getattr(worker, method)(*given)))
        except Exception as error:
            status, reason = _reason(error)
            del error
            try:
                if worker is not None:
                    worker.recover()
            except Exception:
                pipe.send(("lost", reason))
                os._exit(3)
            pipe.send((status, reason))


def _reason(error: Exception) -> tuple[str, str]:
    if isinstance(error, NotMeasured):
        return error.status, str(error)
    if type(error).__name__ == "OutOfMemoryError":
        return "skipped", "out of memory"
    return "failed", f"{type(error).__name__}: {error}".splitlines()[0]
