"""`python -m xent bench`: measure time and memory of the loss on this machine, unfused and with xent, in a minute.

Each implementation runs in its own process, because the operating system only reports the peak memory of a process
since its start.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import xent
from xent.command.show import progress, table
from xent.core.chunks import rows_per_chunk
from xent.core.dispatch import backends

__all__ = ["HEADS", "Shape", "add_arguments", "available", "bench", "measure", "parse"]

HEADS = {
    "Llama-3-8B": (4096, 128256),
    "Gemma-2-9B": (3584, 256000),
    "Qwen3-8B": (4096, 151936),
    "GPT-2": (768, 50257),
}
"""(D, V) of the models' language modelling heads."""
_CONTENDERS = ("unfused", "xent")
_ROWS = 1024
_PATIENCE = 120  # seconds
_MODEL = "GPT-2"
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
_SECONDS = 12.0
_MOST = 50


class Shape(NamedTuple):
    """Hidden states (N, D) and a classifier (V, D)."""

    rows: int
    width: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.width}x{self.vocabulary}"

    def needed(self, itemsize: int, fused: bool) -> int:
        """Return the approximate bytes of a forward and backward pass, including inputs and their gradients.

        The unfused loss stores the logits, their float32 copy, the log-probabilities, and two gradients. The fused loss
        stores one chunk of these, on a GPU a larger one than on a CPU.
        """
        chunk = rows_per_chunk(self.rows, self.vocabulary, itemsize, None, "cuda", sums=True)
        held = (chunk if fused else 2 * self.rows) * self.vocabulary
        return 2 * (self.rows + self.vocabulary) * self.width * itemsize + held * (itemsize + 4)


def parse(text: str, rows: int) -> Shape:
    """Return the shape for "NxDxV", or for a model's name with `rows` rows; raise ValueError for other texts."""
    known = {name.lower(): head for name, head in HEADS.items()}
    if text.lower() in known:
        return Shape(rows, *known[text.lower()])
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"shape must be NxDxV, three numbers > 0, or one of {', '.join(HEADS)}; got {text!r}")
    return Shape(*map(int, parts))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to the parser."""
    heads = ", ".join(f"{name} ({width}x{vocabulary})" for name, (width, vocabulary) in HEADS.items())
    parser.add_argument("shape", nargs="?", default=_MODEL, help=f"tokens x width x vocabulary, as NxDxV; or {heads}")
    parser.add_argument(
        "--tokens", type=int, default=_ROWS, help="rows, where a model names the rest (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=_ITEMSIZE, default="bfloat16")
    parser.add_argument(
        "--framework", choices=("torch", "mlx"), help="whose arrays; the first that is installed if not given"
    )
    parser.add_argument("--measure", choices=_CONTENDERS, help=argparse.SUPPRESS)


def bench(arguments: argparse.Namespace) -> int:
    """Compare the unfused loss and xent; print a table and a sentence; return the exit status."""
    try:
        shape = parse(arguments.shape, arguments.tokens)
        framework = _framework(arguments.framework)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.measure:
        return measure(framework, arguments.measure, shape, arguments.dtype)
    memory, itemsize = available(framework), _ITEMSIZE[arguments.dtype]
    results: dict[str, dict[str, float]] = {}
    notes = []
    with progress(len(_CONTENDERS)) as tell:
        for contender in _CONTENDERS:
            tell(contender)
            needed = shape.needed(itemsize, contender == "xent")
            if memory is not None and needed > memory:
                sizes = f"about {needed / 2**30:.1f} GiB, and this machine has {memory / 2**30:.1f}"
                notes.append(f"{contender} was not run at {shape} {arguments.dtype}: it would take {sizes}.")
                continue
            outcome = _run(contender, shape, arguments.dtype, framework)
            if isinstance(outcome, str):
                notes.append(f"{contender} failed at {shape} {arguments.dtype}: {outcome}")
            else:
                results[contender] = outcome
    rows = [(name, f"{found['milliseconds']:.1f}", f"{found['mebibytes']:.0f}") for name, found in results.items()]
    if rows:
        print(f"Forward and backward pass, {shape} {arguments.dtype}, {framework} arrays:")
        print(table([("loss", "ms", "peak MiB beyond the inputs"), *rows]))
    print("\n".join([*notes, *_sentence(results)]))
    return 0 if "xent" in results else 1


def _framework(asked: str | None) -> str:
    """Return the requested framework, or that of the first available backend."""
    for info in backends():
        if info.available and info.framework != "numpy" and asked in (None, info.framework):
            return info.framework
    if asked is not None:
        raise ValueError(f"--framework must name an installed framework, and {asked} is not installed")
    raise ValueError("python -m xent bench needs PyTorch or MLX, and neither is installed")


def _run(contender: str, shape: Shape, dtype: str, framework: str) -> dict[str, float] | str:
    """Return the measurements of an implementation, or the last line of its error."""
    command = [sys.executable, "-m", "xent", "bench", str(shape), "--dtype", dtype, "--framework", framework]
    command += ["--measure", contender]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return f"it took more than {_PATIENCE} s; fewer tokens take less"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"])[-1]
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _sentence(results: dict[str, dict[str, float]]) -> list[str]:
    if len(results) < len(_CONTENDERS):
        return []
    unfused, ours = results["unfused"], results["xent"]
    of_time = ours["milliseconds"] / unfused["milliseconds"]
    of_memory = ours["mebibytes"] / max(unfused["mebibytes"], 1)
    return [f"xent takes {of_time:.2f} of the unfused loss's time and {of_memory:.2f} of its memory."]


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
    step, peak = (_torch if framework == "torch" else _mlx)(contender, shape, dtype)
    times: list[float] = []
    mebibytes = 0.0
    while sum(times) < _SECONDS and len(times) <= _MOST:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
        mebibytes = mebibytes if times[1:] else peak() / 2**20
    later = sorted(times[1:] or times)  # the first call may compile kernels
    print(json.dumps({"milliseconds": later[len(later) // 2] * 1e3, "mebibytes": mebibytes}))
    return 0


def _torch(contender: str, shape: Shape, dtype: str) -> Any:
    import torch
    import torch.nn.functional as F

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(shape.rows, shape.width, device=device).to(getattr(torch, dtype)).requires_grad_()
    weight = torch.empty(shape.vocabulary, shape.width, device=device, dtype=getattr(torch, dtype))
    weight = weight.normal_(0, shape.width**-0.5).requires_grad_()
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
        if cuda:
            torch.cuda.synchronize()

    some = min(shape.rows, 8)  # the first call imports modules and compiles kernels
    run(
        hidden[:some].detach().requires_grad_(),
        weight[:64].detach().requires_grad_(),
        target[:some] % min(shape.vocabulary, 64),
    )
    if not cuda:
        return step, _resident()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    return step, lambda: torch.cuda.max_memory_allocated() - start


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
    return lambda: mx.eval(function(hidden, weight)), lambda: mx.get_peak_memory() - start


def _resident() -> Callable[[], int]:
    """Return a function that returns by how much the peak memory of the process has grown since now, in bytes.

    An earlier, higher peak may hide a part of the growth.
    """
    import resource

    unit = 1 if sys.platform == "darwin" else 1024

    def most() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    start = most()
    return lambda: most() - start
