"""The peak of resident memory of one call, in a process that has called nothing but losses of four rows before."""

import multiprocessing
import sys
import traceback
from multiprocessing.connection import Connection

import torch

import xent
from benchmarks.memory import resident_peak

__all__ = ["peak"]


def peak(setup: str, call: str) -> int:
    """Return by how many bytes a call raises the resident memory of a new process.

    On Linux, the process is forked from one that has imported PyTorch, which takes longer than most calls.
    """
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload([__name__, "tests.torch.loaded"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(theirs, setup, call))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    assert isinstance(found, int), found
    return found


def _measure(pipe: Connection, setup: str, call: str) -> None:
    """Measure with two threads: each of them has buffers of its own for matrix products."""
    try:
        torch.set_num_threads(2)
        warm, classes = torch.randn(4, 8, requires_grad=True), torch.zeros(4, dtype=torch.int64)
        for few_or_many in (warm, torch.randn(4, 5000, requires_grad=True)):  # each touches code of PyTorch
            xent.cross_entropy(few_or_many, classes).backward()
        xent.linear_cross_entropy(warm, torch.randn(50, 8, requires_grad=True), classes).backward()
        names = {"torch": torch, "xent": xent}
        exec(setup, names)
        code = compile(call, "call", "exec")
        pipe.send(resident_peak(lambda: exec(code, names)))
    except BaseException:
        pipe.send(traceback.format_exc())
