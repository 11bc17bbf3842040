"""xent beside MLX's own unfused loss: time, peak memory and errors, on MLX's default device.

    python -m benchmarks.mlx [--quick] [--repeats N] [--limit MIB] [--out FILE]

All contenders run in this process, because MLX counts its memory exactly. In each round every contender makes one
untimed and one timed call, so that temporary slowdowns affect all of them. The reported ratio is the median of the
ratios within a round. Only MLX and xent are needed. On NVIDIA GPUs MLX compiles its kernels at their first use, which
takes more than a minute in the first run on a machine. There MLX also keeps the arrays of pending work until the limit
of `mx.set_memory_limit` is reached; `--limit` sets it, above the inputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import xent

__all__ = ["CASES", "QUICK", "Case", "main"]

_MIB = 2**20
_BASE = "unfused"


@dataclass(frozen=True)
class Case:
    """One linear classifier: sizes, dtype, the workspace in rows of logits, and the project's goals for it."""

    tokens: int
    hidden: int
    vocabulary: int
    dtype: str
    rows: int | None = None
    most_time: float | None = None
    """Goal for the time, as a multiple of the unfused time."""
    most_mib: float | None = None
    """Goal for the peak memory above the inputs."""
    most_mib_compiled: float | None = None

    @property
    def title(self) -> str:
        """The case in one line."""
        chunks = "" if self.rows is None else f", {self.rows} rows a chunk"
        return f"linear {self.tokens}x{self.hidden}x{self.vocabulary} {self.dtype}{chunks}, forward + backward"


CASES: dict[str, tuple[Case, ...]] = {
    "cpu": (
        Case(1024, 32, 16384, "float32", rows=64, most_time=1.1, most_mib=45, most_mib_compiled=60),
        Case(512, 256, 32000, "float32"),
        Case(512, 256, 32000, "bfloat16"),
    ),
    "gpu": (
        Case(8192, 4096, 128256, "bfloat16", most_time=1.15, most_mib=2000),
        *(Case(8192, 4096, 128256, "bfloat16", rows=rows) for rows in (512, 1024, 2048)),
        Case(8192, 2304, 256000, "bfloat16"),
        Case(8192, 2048, 32000, "bfloat16"),
    ),
}
"""The cases for each kind of device."""

QUICK = (Case(256, 32, 2048, "float32", rows=64), Case(256, 32, 2048, "bfloat16", rows=64))
"""Small sizes, to test that everything runs."""

Step = Callable[[mx.array, mx.array], Any]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON lines; 1 if a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mlx", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    parser.add_argument("--repeats", type=int, help="rounds (5, quick: 2)")
    parser.add_argument("--limit", type=int, metavar="MIB", help="of memory above the inputs, at which MLX waits")
    parser.add_argument("--out", type=Path, help="a file for JSON lines")
    options = parser.parse_args(arguments)
    device = "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"
    rounds = options.repeats or (2 if options.quick else 5)
    missed = 0
    with options.out.open("w", encoding="utf-8") if options.out else nullcontext() as file:
        for case in QUICK if options.quick else CASES[device]:
            print(f"\n{case.title}")
            print(f"{'':24}{'ms':>10}{'x unfused':>11}{'peak MiB':>10}{'loss error':>12}{'dInput':>9}{'dWeight':>9}")
            for line in _measure(case, rounds, options.limit):
                line |= {"case": asdict(case), "limit_mib": options.limit, "device": device}
                line |= {"mlx": mx.__version__, "xent": xent.__version__}
                missed += bool(line["missed"])
                _print(line)
                if file:
                    print(json.dumps(line), file=file, flush=True)
    return int(missed > 0)


def _measure(case: Case, rounds: int, limit_mib: int | None) -> list[dict[str, Any]]:
    """Return one line for each contender."""
    mx.random.seed(20240229)
    dtype = getattr(mx, case.dtype)
    x = mx.random.normal((case.tokens, case.hidden)).astype(dtype)
    w = (mx.random.normal((case.vocabulary, case.hidden)) * case.hidden**-0.5).astype(dtype)
    y = mx.random.randint(0, case.vocabulary, (case.tokens,))
    mx.eval(x, w, y)
    mx.synchronize()
    with _limited(limit_mib):
        return _compare(case, rounds, x, w, y)


@contextmanager
def _limited(mib: int | None) -> Iterator[None]:
    """Set MLX's memory limit to this much above the present use; at the limit MLX waits for pending work."""
    if mib is None:
        yield
        return
    before = mx.set_memory_limit(mx.get_active_memory() + mib * _MIB)
    try:
        yield
    finally:
        mx.set_memory_limit(before)


def _compare(case: Case, rounds: int, x: mx.array, w: mx.array, y: mx.array) -> list[dict[str, Any]]:
    contenders = _contenders(case, y)
    lines, results = {}, {}
    for name, step in contenders.items():
        mx.eval(step(x, w))
        results[name], peak = _peak(step, x, w)
        lines[name] = {"contender": name, "peak_mib": peak / _MIB, "seconds": [], "loss": results[name][0].item()}
    for _ in range(rounds):
        for name, step in contenders.items():
            _timed(step, x, w)
            lines[name]["seconds"].append(_timed(step, x, w))
    for name, line in lines.items():
        pairs = zip(line["seconds"], lines[_BASE]["seconds"], strict=True)
        line["ratio"] = statistics.median(mine / base for mine, base in pairs)
        line["errors"] = _errors(results[name], x, w, y)
        line["missed"] = _missed(case, line)
    return list(lines.values())


def _contenders(case: Case, y: mx.array) -> dict[str, Step]:
    itemsize = getattr(mx, case.dtype).size
    workspace = None if case.rows is None else case.rows * case.vocabulary * itemsize

    def unfused(x: mx.array, w: mx.array) -> mx.array:
        return nn.losses.cross_entropy(x @ w.T, y).astype(mx.float32).mean()

    def fused(x: mx.array, w: mx.array) -> mx.array:
        return xent.linear_cross_entropy(x, w, y, workspace=workspace)

    steps = {_BASE: unfused, "xent": fused}
    eager = {name: mx.value_and_grad(loss, argnums=(0, 1)) for name, loss in steps.items()}
    return eager | {f"{name}, compiled": mx.compile(step) for name, step in eager.items()}


def _peak(step: Step, x: mx.array, w: mx.array) -> tuple[tuple[mx.array, ...], int]:
    """Return the results of a call as (loss, *gradients), and its peak bytes above those before it."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loss, gradients = step(x, w)
    mx.eval(loss, gradients)
    mx.synchronize()
    return (loss, *gradients), mx.get_peak_memory() - before


def _timed(step: Step, x: mx.array, w: mx.array) -> float:
    start = time.perf_counter()
    made = step(x, w)
    mx.eval(made)
    mx.synchronize()
    return time.perf_counter() - start


def _errors(results: tuple[mx.array, ...], x: mx.array, w: mx.array, y: mx.array) -> list[float]:
    """Return the loss's relative error and the relative errors of rows of both gradients, against float32 products."""
    some = mx.arange(0, len(x), max(len(x) // 64, 1))
    classes = y[some]
    wide, block = partial(mx.array.astype, dtype=mx.float32), 1024
    lse, dw, dx = [], mx.zeros((len(classes), x.shape[1])), None
    for start in range(0, len(x), block):
        rows = slice(start, start + block)
        logits = wide(x[rows]) @ wide(w).T
        lse.append(mx.logsumexp(logits, axis=-1))
        p = mx.exp(logits[:, classes] - lse[-1][:, None]) - (y[rows][:, None] == classes)
        dw = dw + p.T @ wide(x[rows])
        mx.eval(lse, dw)
    lses = mx.concatenate(lse)
    loss = (lses - (wide(x) * wide(w[y])).sum(-1)).mean()
    p = mx.exp(wide(x[some]) @ wide(w).T - lses[some][:, None])
    dx = (p @ wide(w) - wide(w[y[some]])) / len(x)
    pairs = ((results[0], loss), (results[1][some], dx), (results[2][classes], dw / len(x)))
    return [(mx.linalg.norm(wide(one - other)) / mx.linalg.norm(other)).item() for one, other in pairs]


def _missed(case: Case, line: dict[str, Any]) -> list[str]:
    """Return the goals that a line misses."""
    name = line["contender"]
    if not name.startswith("xent"):
        return []
    most_mib = case.most_mib if name == "xent" else case.most_mib_compiled
    goals = {
        "time": (line["ratio"], case.most_time if name == "xent" else None),
        "memory": (line["peak_mib"], most_mib),
    }
    return [f"{what} above {most}" for what, (found, most) in goals.items() if most is not None and found > most]


def _print(line: dict[str, Any]) -> None:
    milliseconds = 1000 * statistics.median(line["seconds"])
    errors = "".join(f"{error:>{width}.1e}" for error, width in zip(line["errors"], (12, 9, 9), strict=True))
    missed = f"  MISSED: {', '.join(line['missed'])}" if line["missed"] else ""
    print(f"{line['contender']:24}{milliseconds:10.2f}{line['ratio']:11.2f}{line['peak_mib']:10.1f}{errors}{missed}")


if __name__ == "__main__":
    sys.exit(main())
