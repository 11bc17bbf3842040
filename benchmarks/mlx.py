"""xent beside MLX's own unfused loss: time, peak memory and errors, on MLX's default device.

All contenders run in this process, because MLX counts its memory exactly. In each round every contender makes one
untimed and one timed call, so that temporary slowdowns affect all of them. The ratio is the median of the ratios within
a round. Errors are against the unfused loss of float32 inputs. Only MLX, xent and the packages of the tables are
needed. On NVIDIA GPUs MLX compiles its kernels at their first use, which takes more than a minute in the first run on a
machine. There MLX also keeps the arrays of pending work until the limit of `mx.set_memory_limit` is reached; `--limit`
sets it, above the inputs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import xent
from benchmarks.cases import SUITES, Case, quick
from benchmarks.facts import machine_facts
from benchmarks.records import Record, write_records
from benchmarks.report import make_console, print_report

__all__ = ["main"]

_MIB = 2**20

Step = Callable[[mx.array, mx.array], Any]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print tables, write JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mlx", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    parser.add_argument("--repeats", type=int, help="rounds (5, quick: 2)")
    parser.add_argument("--limit", type=int, metavar="MIB", help="of memory above the inputs, at which MLX waits")
    parser.add_argument("--out", type=Path, help="a file for JSON lines")
    options = parser.parse_args(arguments)
    device = "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"
    machine = machine_facts() | {"limit_mib": options.limit} | ({"gpu": "MLX's GPU"} if device == "gpu" else {})
    records: list[Record] = []
    for case in SUITES["mlx"][device]:
        small = quick(case) if options.quick else case
        records += _measure(small, options.repeats or (2 if options.quick else 5), options.limit, machine)
        if options.out:
            options.out.write_text("".join(write_records(records)), encoding="utf-8")
    print_report(make_console(), f"MLX, {device}", records)
    return 0


def _measure(case: Case, rounds: int, limit_mib: int | None, machine: dict[str, Any]) -> list[Record]:
    """Return one record for each contender."""
    mx.random.seed(20240229)
    dtype = getattr(mx, case.dtype)
    x = mx.random.normal((case.tokens, case.hidden)).astype(dtype)
    w = (mx.random.normal((case.vocabulary, case.hidden)) * case.hidden**-0.5).astype(dtype)
    y = mx.random.randint(0, case.vocabulary, (case.tokens,))
    mx.eval(x, w, y)
    mx.synchronize()
    records = [Record(case, name, machine=machine, gradient_bytes=case.gradient_bytes) for name in case.contenders]
    truth, _ = _peak(_step(case, case.contenders[0], y), x.astype(mx.float32), w.astype(mx.float32))
    before = mx.set_memory_limit(mx.get_active_memory() + limit_mib * _MIB) if limit_mib else None
    try:
        steps = [_step(case, name, y) for name in case.contenders]
        for step, record in zip(steps, records, strict=True):
            mx.eval(step(x, w))
            results, record.peak_bytes = _peak(step, x, w)
            record.loss = results[0].item()
            vars(record).update(_errors(results, truth))
        for _ in range(rounds):
            for step, record in zip(steps, records, strict=True):
                _timed(step, x, w)
                record.seconds.append(_timed(step, x, w))
                if record is not records[0]:
                    record.pairs.append((records[0].seconds[-1], record.seconds[-1]))
                    record.base_peak_bytes, record.base_gradient_bytes = records[0].peak_bytes, case.gradient_bytes
    finally:
        if before is not None:
            mx.set_memory_limit(before)
    return records


def _step(case: Case, name: str, y: mx.array) -> Step:
    rows = dict(case.options).get("rows")
    workspace = None if rows is None else rows * case.logits_bytes // case.tokens

    def unfused(x: mx.array, w: mx.array) -> mx.array:
        return nn.losses.cross_entropy(x @ w.T, y).astype(mx.float32).mean()

    def fused(x: mx.array, w: mx.array) -> mx.array:
        return xent.linear_cross_entropy(x, w, y, workspace=workspace)

    eager: Step = mx.value_and_grad(fused if name.startswith("xent") else unfused, argnums=(0, 1))
    return mx.compile(eager) if name.endswith("compiled") else eager


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
    mx.eval(step(x, w))
    mx.synchronize()
    return time.perf_counter() - start


def _errors(results: tuple[mx.array, ...], truth: tuple[mx.array, ...]) -> dict[str, float]:
    """Return the absolute error of the loss and the relative errors of both gradients."""
    wide = [result.astype(mx.float32) for result in results]
    errors = [
        (mx.linalg.norm(found - true) / mx.linalg.norm(true)).item() for found, true in zip(wide, truth, strict=True)
    ]
    loss = abs(wide[0] - truth[0]).item()
    return {"loss_error": loss, "input_gradient_error": errors[1], "weight_gradient_error": errors[2]}


if __name__ == "__main__":
    sys.exit(main())
