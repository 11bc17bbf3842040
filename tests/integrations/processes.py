"""Run a module in several processes: with torchrun, or forked from a process that has imported the libraries."""

import os
import runpy
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory

import torch

from tests.forks import forking
from tests.packaging.tree import ROOT

__all__ = ["GPUS", "launch", "torchrun"]

GPUS = torch.cuda.device_count()
PATIENCE = 180
"""Seconds that the processes may take."""


def torchrun(processes: int, module: str, *arguments: str, gpus: bool = GPUS > 1, patience: int = PATIENCE) -> str:
    """Run a module with torchrun and return its output. GPUs are hidden from it if there are too few."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launcher, "-m", module, *arguments]
    hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | hidden, capture_output=True, text=True, timeout=patience, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def launch(processes: int, module: str, *arguments: str, gpus: bool = GPUS > 1) -> str:
    """Run a module like `torchrun`, without starting Python and importing the libraries in each process."""
    if GPUS:
        return torchrun(processes, module, *arguments, gpus=gpus)
    with TemporaryDirectory() as folder:
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        files = [Path(folder, str(rank)) for rank in range(processes)]
        ranks = []
        for rank, file in enumerate(files):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), **address}
            ranks.append(forking().Process(target=_run, args=(file, place, module, arguments)))
            ranks[-1].start()
        deadline, left = time.monotonic() + PATIENCE, {process.sentinel: process for process in ranks}
        while left and (ended := wait(left, max(deadline - time.monotonic(), 0))):
            for process in map(left.pop, ended):
                if process.exitcode:  # the others may wait for this rank forever
                    deadline = min(deadline, time.monotonic() + 2)
        for process in left.values():
            process.kill()
            process.join()
        printed = [file.read_text(encoding="utf-8") for file in files]
        assert [process.exitcode for process in ranks] == [0] * processes, "\n".join(printed)[-4000:]
        return "".join(printed)


def free_port() -> int:
    """Return a port below those that the system gives to connections: none takes it before rank 0 does."""
    while True:
        port = SystemRandom().randrange(10_000, 30_000)
        with suppress(OSError), socket.create_server(("localhost", port)):
            return port


def _run(file: Path, place: dict[str, str], module: str, arguments: tuple[str, ...]) -> None:
    """Run a module in a process of its own, whose output goes to a file."""
    output = os.open(file, os.O_CREAT | os.O_WRONLY)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.environ.update(place)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
