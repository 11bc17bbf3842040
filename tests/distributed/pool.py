"""A group of processes that is started once for all tests and runs one function after the other.

NCCL is used on GPUs if there are at least two, else gloo on the CPU. A group of fewer ranks has the first ranks.
"""

import datetime
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.forks import forking
from tests.interpreter import prepare

__all__ = ["GPUS", "INTERPRETED", "PROCESSES", "Pool", "device", "group"]

GPUS = torch.cuda.is_available() and torch.cuda.device_count() >= 2
PROCESSES = min(torch.cuda.device_count(), 4) if GPUS else 4
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PATIENCE = 60 if GPUS else 20  # time limit of a call, in seconds; on a GPU kernels are compiled in it
_groups: dict[int, Any] = {}


def device() -> torch.device:
    """Return the device of this process."""
    return torch.device("cuda", torch.cuda.current_device()) if GPUS else torch.device("cpu")


def group(ranks: int) -> Any:
    """Return the group of the first ranks; None in a process that is not among them."""
    return _groups[ranks] if dist.get_rank() < ranks else None


class Pool:
    """The processes, controlled by the tests."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a module's function in all processes. Return the list of results, or raise the errors."""
        self._start()
        for end in self._ends:
            end.send((function, args))
        found: dict[int, tuple[str | None, Any]] = {}
        deadline = time.monotonic() + PATIENCE
        while len(found) < PROCESSES and (left := deadline - time.monotonic()) > 0:
            for end in wait([end for rank, end in enumerate(self._ends) if rank not in found], left):
                rank = self._ends.index(end)  # type: ignore[arg-type]
                try:
                    found[rank] = self._ends[rank].recv()
                except (EOFError, OSError):
                    self.stop()
                    raise AssertionError(f"the process of rank {rank} has ended") from None
                if found[rank][0]:  # the others may wait for this rank forever
                    deadline = min(deadline, time.monotonic() + 2)
        errors = [f"rank {rank}: {error}" for rank, (error, _) in found.items() if error]
        if len(found) < PROCESSES:
            self.stop()
            errors.append(f"no answer from ranks {sorted(set(range(PROCESSES)) - set(found))}")
        assert not errors, "\n".join(errors)
        return [found[rank][1] for rank in range(PROCESSES)]

    def stop(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._ends = [], []

    def _start(self) -> None:
        if self._processes:
            return
        if torch.cuda.is_available():  # a forked process could not use CUDA
            context: Any = mp.get_context("spawn")
        else:
            context = forking()
        folder = tempfile.mkdtemp()
        for rank in range(PROCESSES):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(mine)
        for end in self._ends:
            assert end.poll(3 * PATIENCE), "the processes do not find each other"
            end.recv()


def _work(rank: int, folder: str, end: Connection) -> None:
    torch.set_num_threads(1)
    if INTERPRETED:
        prepare()
    torch.use_deterministic_algorithms(not GPUS)  # fills uninitialised memory with NaN
    if GPUS:
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if GPUS else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    for ranks in range(1, PROCESSES):
        _groups[ranks] = dist.new_group(list(range(ranks)))
    _groups[PROCESSES] = dist.group.WORLD
    end.send("ready")
    while True:
        try:
            function, args = end.recv()
        except EOFError:
            break
        try:
            end.send((None, function(*args)))
        except BaseException:
            end.send((traceback.format_exc(), None))
    time.sleep(0.2)  # PyTorch 2.13 can wait forever for gloo's threads if they still hold tensors
    os._exit(0)
