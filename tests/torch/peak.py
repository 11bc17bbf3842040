"""Peaks of resident memory of calls, in a process that has called nothing but losses of four rows before."""

import multiprocessing
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

import xent
from benchmarks.memory import resident_peak

__all__ = ["peaks"]


def peaks(*measurements: tuple[str, str]) -> list[int]:
    """Return by how many bytes each call, after its setup, raises the resident memory of a new process.

    On Linux one process makes all of them, and is forked from one that has imported PyTorch. Other systems only report
    the highest memory that a process ever had, so that each call has its own.
    """
    if sys.platform != "linux":
        return [_started("spawn", [one])[0] for one in measurements]
    return _started("forkserver", measurements)


def _started(method: str, measurements: Sequence[tuple[str, str]]) -> list[int]:
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([__name__, "tests.torch.loaded"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(theirs, measurements))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    assert isinstance(found, list), found
    return found


def _measure(pipe: Connection, measurements: Sequence[tuple[str, str]]) -> None:
    """Measure with two threads: each of them has buffers of its own for matrix products."""
    try:
        torch.set_num_threads(2)
        warm, classes = torch.randn(4, 8, requires_grad=True), torch.zeros(4, dtype=torch.int64)
        for few_or_many in (warm, torch.randn(4, 5000, requires_grad=True)):  # each touches code of PyTorch
            xent.cross_entropy(few_or_many, classes).backward()
        xent.linear_cross_entropy(warm, torch.randn(50, 8, requires_grad=True), classes).backward()
        found = []
        for setup, call in measurements:
            names: dict[str, Any] = {"torch": torch, "xent": xent}
            exec(setup, names)
            code = compile(call, "call", "exec")
            found.append(resident_peak(lambda code=code, names=names: exec(code, names)))
        pipe.send(found)
    except BaseException:
        pipe.send(traceback.format_exc())
