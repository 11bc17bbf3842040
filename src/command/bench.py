"""`python -m xent bench`: measure time and memory of the loss on this machine, unfused and with xent, in a minute.

xent is measured first, because only the peak since the start is read, and the unfused loss takes more.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import xent
from xent.backends import backends

__all__ = ["HEADS", "add_arguments", "available", "bench", "parse"]

HEADS = {
    "Llama-3-8B": (4096, 128256),
    "Gemma-2-9B": (3584, 256000),
    "Qwen3-8B": (4096, 151936),
    "GPT-2": (768, 50257),
}
"""(D, V) of the models' language modelling heads."""
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
_SECONDS = 12.0
_MOST = 50
Shape = tuple[int, int, int]
"""Hidden states (N, D) and a classifier (V, D): N, D, V."""
Step = Callable[[], object]
"""A forward and backward pass."""
Measured = tuple[Mapping[str, Step], Callable[[], int]]
"""A step with each loss, and the peak bytes beyond the inputs so far."""


def parse(text: str, rows: int) -> Shape:
    """Return the shape for "NxDxV", or for a model's name with `rows` rows; raise ValueError for other texts."""
    for name, (width, vocabulary) in HEADS.items():
        if text.lower() == name.lower():
            return rows, width, vocabulary
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"shape must be NxDxV, three numbers > 0, or one of {', '.join(HEADS)}; got {text!r}")
    rows, width, vocabulary = map(int, parts)
    return rows, width, vocabulary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to the parser."""
    heads = ", ".join(f"{name} ({width}x{vocabulary})" for name, (width, vocabulary) in HEADS.items())
    parser.add_argument("shape", nargs="?", default="GPT-2", help=f"tokens x width x vocabulary, as NxDxV; or {heads}")
    parser.add_argument("--tokens", type=int, default=1024, help="rows, where a model names the rest (default: 1024)")
    parser.add_argument("--dtype", choices=_ITEMSIZE, default="bfloat16")
    parser.add_argument(
        "--framework", choices=("torch", "mlx"), help="whose arrays; the first that is installed if not given"
    )


def bench(arguments: argparse.Namespace) -> int:
    """Compare xent and the unfused loss; print a table and a sentence; return the exit status."""
    frameworks = [info.framework for info in backends() if info.available and info.framework != "numpy"]
    framework = arguments.framework or next(iter(frameworks), "PyTorch or MLX")
    try:
        if framework not in frameworks:
            raise ValueError(f"--framework must name an installed framework, and {framework} is not installed")
        shape = rows, width, vocabulary = parse(arguments.shape, arguments.tokens)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    memory, size = available(framework), _ITEMSIZE[arguments.dtype]
    # Inputs and their gradients; and for the unfused loss logits, their float32 copy, and the gradients of both.
    inputs = 2 * (rows + vocabulary) * width * size
    needed = {"xent": inputs, "unfused": inputs + 2 * rows * vocabulary * (size + 4)}
    title = f"{rows}x{width}x{vocabulary} {arguments.dtype}"
    print(f"Forward and backward pass, {title}, {framework} arrays:")
    measured: Measured | None = None
    results: dict[str, tuple[float, float]] = {}
    for name, least in needed.items():
        if memory is not None and least > memory:
            sizes = f"about {least / 2**30:.1f} GiB, and this machine has {memory / 2**30:.1f}"
            print(f"{name} was not run at {title}: it would take {sizes}.")
            continue
        try:
            measured = measured or (_torch if framework == "torch" else _mlx)(shape, arguments.dtype)
            steps, peak = measured
            results[name] = milliseconds, mebibytes = _milliseconds(steps[name]), peak() / 2**20
            print(f"{name:8} {milliseconds:9.1f} ms {mebibytes:9.0f} MiB beyond the inputs", flush=True)
        except Exception as error:
            print(f"{name} failed at {title}: {type(error).__name__}: {error}")
    if len(results) == 2:
        of_time, of_memory = (ours / max(unfused, 1e-9) for ours, unfused in zip(*results.values(), strict=True))
        print(f"xent takes {of_time:.2f} of the unfused loss's time and {of_memory:.2f} of its memory.")
    return 0 if "xent" in results else 1


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


def _milliseconds(step: Step) -> float:
    """Return the median time of a step, without the first, which imports modules and compiles kernels."""
    times: list[float] = []
    while sum(times) < _SECONDS and len(times) <= _MOST:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times) * 1e3


def _torch(shape: Shape, dtype: str) -> Measured:
    import torch
    import torch.nn.functional as F

    cuda, (rows, width, vocabulary) = torch.cuda.is_available(), shape
    device = "cuda" if cuda else "cpu"

    def drawn(count: int) -> torch.Tensor:
        array = torch.randn(count, width, dtype=getattr(torch, dtype), device=device)
        return array.mul_(width**-0.25).requires_grad_()

    hidden, weight, target = drawn(rows), drawn(vocabulary), torch.randint(vocabulary, (rows,), device=device)
    peak = torch.cuda.max_memory_allocated if cuda else _resident
    start = peak()

    def step(loss: Callable[..., torch.Tensor]) -> None:
        torch.autograd.grad(loss(hidden, weight, target), (hidden, weight))
        if cuda:
            torch.cuda.synchronize()

    def unfused(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((hidden @ weight.T).float(), target)

    return {"xent": partial(step, xent.linear_cross_entropy), "unfused": partial(step, unfused)}, lambda: peak() - start


def _resident() -> int:
    """Return the peak memory of this process in bytes. An earlier, higher peak may hide a part of a growth."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _mlx(shape: Shape, dtype: str) -> Measured:
    import mlx.core as mx
    import mlx.nn as nn

    rows, width, vocabulary = shape
    hidden, weight = (
        mx.random.normal((count, width), getattr(mx, dtype), scale=width**-0.25) for count in (rows, vocabulary)
    )
    target = mx.random.randint(0, vocabulary, (rows,))
    mx.eval(hidden, weight, target)
    mx.reset_peak_memory()
    start = mx.get_active_memory()

    def step(loss: Callable[..., mx.array]) -> None:
        mx.eval(mx.value_and_grad(loss, argnums=(0, 1))(hidden, weight, target))

    def unfused(hidden: mx.array, weight: mx.array, target: mx.array) -> mx.array:
        loss: mx.array = nn.losses.cross_entropy((hidden @ weight.T).astype(mx.float32), target, reduction="mean")
        return loss

    steps = {"xent": partial(step, xent.linear_cross_entropy), "unfused": partial(step, unfused)}
    return steps, lambda: mx.get_peak_memory() - start
