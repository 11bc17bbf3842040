"""Measure one implementation for `python -m xent bench`: time and peak memory of a forward and backward pass.

Each implementation runs in its own process, because the operating system only reports the peak memory of a process
since its start.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xent
from xent.command.heads import Shape

__all__ = ["available", "measure"]

_SECONDS = 12.0
_MOST = 50
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def available(framework: str) -> int | None:
    """Return the bytes of free GPU memory, or of physical memory on a CPU; None if unknown."""
    if framework == "torch":
        import torch

        if torch.cuda.is_available():
            return int(torch.cuda.mem_get_info()[0])
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def measure(framework: str, contender: str, shape: Shape, dtype: str) -> int:
    """Print the time of a call in ms and the peak memory above the inputs in MiB, as JSON; return the exit status."""
    step, wait, peak = (_torch if framework == "torch" else _mlx)(contender, shape, dtype)
    begun = time.perf_counter()
    step()
    wait()
    first = time.perf_counter() - begun
    mebibytes = peak() / 2**20
    times = [first] if first > _SECONDS else []
    while not times or (len(times) < _MOST and time.perf_counter() - begun < _SECONDS):
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    print(
        json.dumps({"milliseconds": sorted(times)[len(times) // 2] * 1e3, "mebibytes": mebibytes, "calls": len(times)})
    )
    return 0


def _torch(contender: str, shape: Shape, dtype: str) -> Any:
    import torch
    import torch.nn.functional as F

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(shape.rows, shape.width, device=device).to(getattr(torch, dtype)).requires_grad_()
    weight = torch.randn(shape.vocabulary, shape.width, device=device).mul_(shape.width**-0.5)
    weight = weight.to(getattr(torch, dtype)).requires_grad_()
    target = torch.randint(shape.vocabulary, (shape.rows,), device=device)

    def run(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> None:
        if contender == "xent":
            loss = xent.linear_cross_entropy(hidden, weight, target)
        else:
            loss = F.cross_entropy((hidden @ weight.T).float(), target)
        loss.backward()

    def step() -> None:
        hidden.grad = weight.grad = None
        run(hidden, weight, target)

    some = min(shape.rows, 8)  # the first call imports modules and compiles kernels
    run(
        hidden[:some].detach().requires_grad_(),
        weight[:64].detach().requires_grad_(),
        target[:some] % min(shape.vocabulary, 64),
    )
    if not cuda:
        return step, lambda: None, _resident()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    return step, torch.cuda.synchronize, lambda: torch.cuda.max_memory_allocated() - start


def _mlx(contender: str, shape: Shape, dtype: str) -> Any:
    import mlx.core as mx
    import mlx.nn as nn

    mx.random.seed(0)
    hidden = mx.random.normal((shape.rows, shape.width)).astype(getattr(mx, dtype))
    weight = (mx.random.normal((shape.vocabulary, shape.width)) * shape.width**-0.5).astype(getattr(mx, dtype))
    target = mx.random.randint(0, shape.vocabulary, (shape.rows,))

    def loss(hidden: Any, weight: Any) -> Any:
        if contender == "xent":
            return xent.linear_cross_entropy(hidden, weight, target)
        return nn.losses.cross_entropy((hidden @ weight.T).astype(mx.float32), target, reduction="mean")

    function = mx.value_and_grad(loss, argnums=(0, 1))
    mx.eval(hidden, weight, target)
    mx.reset_peak_memory()
    start = mx.get_active_memory()
    return lambda: mx.eval(function(hidden, weight)), lambda: None, lambda: mx.get_peak_memory() - start


def _resident() -> Callable[[], int]:
    """Return a function that returns the peak growth of the process since now, in bytes.

    On Linux the peak can be reset. On other systems an earlier, higher peak may hide a part of the growth.
    Linux's number is wrong by some pages: a peak below the start is no growth.
    """
    try:
        _CLEAR.write_text("5")
    except OSError:
        return _rising()
    start = _high_water()
    return lambda: max(_high_water() - start, 0)


def _high_water() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _rising() -> Callable[[], int]:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024

    def most() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    start = most()
    return lambda: most() - start
