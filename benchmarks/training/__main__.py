"""Measure training steps of whole models of transformers, unpatched and patched by xent, side by side.

On a GPU the models have the sizes of GPT-2 and of Llama-3.2-1B, in bfloat16; on a CPU a mid-size model in float32 is
used. Weights are random. Both variants are in memory at the same time and take turns. The results are written to a
file, with a plot of memory against sequence length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.devices import DEVICES, default_device
from benchmarks.machine import machine_facts
from benchmarks.process import NotMeasured, Process
from benchmarks.protocol import Describe, OpenTraining, Steps
from benchmarks.training.models import MODELS
from benchmarks.training.plot import save_plot

__all__ = ["main"]

_DEFAULT_OUT = Path(__file__).resolve().parents[1] / "out"
_MIB = 2**20
_RUNS = {"cuda": [("gpt2", [2048]), ("1b", [1024, 2048, 4096])], "cpu": [("mid", [256, 512, 1024, 2048])]}
_VARIANTS = ("plain", "patched")
# Make glibc return freed memory to the system; otherwise it would be missing in the measured peak.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and show the results; return 1 if a variant failed."""
    options = _options(arguments)
    if options.show:
        _show([json.loads(line) for line in options.show.read_text(encoding="utf-8").splitlines()][1:])
        return 0
    runs = [(options.model, options.lengths or _RUNS[options.device][0][1])] if options.model else _RUNS[options.device]
    results: list[dict[str, Any]] = []
    machine = machine_facts()
    try:
        for model, lengths in runs:
            for length in options.lengths or lengths:
                results += _measure(options, model, length, machine)
                print(f"{model}, {length} tokens: done", file=sys.stderr, flush=True)
    except NotMeasured as failure:
        print(f"failed: {failure}", file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"training-{options.device}{'-checkpointing' if options.checkpointing else ''}"
    lines = [{"machine": machine}, *results]
    stem.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for model, lengths in runs:
        if len(options.lengths or lengths) > 1:
            mine = [result for result in results if result["model"] == model]
            save_plot(mine, f"{model}, {options.dtype}", stem.with_name(f"{stem.name}-{model}.png"))
    _show(results)
    print(f"written: {stem}.jsonl")
    return int(len(results) < 2 * sum(len(options.lengths or lengths) for _, lengths in runs))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    add = parser.add_argument
    add("--device", choices=tuple(DEVICES), default=default_device(), help="the GPU if there is one")
    add("--model", choices=tuple(MODELS), help="gpt2 and 1b on a GPU, mid on a CPU, if not given")
    add("--dtype", choices=("bfloat16", "float32"), help="the first on a GPU, the second on a CPU")
    add("--lengths", type=int, nargs="+", metavar="TOKENS", help="sequence lengths, if not those of the model")
    add("--steps", type=int, default=10, help="steps of a loop (10)")
    add("--rounds", type=int, default=7, help="loops of each variant, of which the median counts (7)")
    add("--checkpointing", action="store_true", help="recompute activations in backward")
    add("--out", type=Path, default=_DEFAULT_OUT, help="folder of the results (%(default)s)")
    add("--show", type=Path, metavar="JSONL", help="measure nothing, print the table of these results")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return options


def _measure(options: argparse.Namespace, model: str, length: int, machine: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure both variants in turns, in alternating order; return one result each.

    The facts about the device are added to those about the machine.
    """
    with ExitStack() as stack:
        results = {}
        processes = {}
        for variant in _VARIANTS:
            processes[variant] = stack.enter_context(Process("benchmarks.training.worker", _ENVIRONMENT))
            request = OpenTraining(variant, model, length, options.device, options.dtype, options.checkpointing)
            results[variant] = {**vars(request), **processes[variant].ask(request), "rounds": []}
        facts = processes["plain"].ask(Describe(options.device))
        machine |= facts | {"versions": machine["versions"] | facts["versions"]}
        for number in range(options.rounds):
            for variant in _VARIANTS[:: 1 if number % 2 else -1]:
                results[variant]["rounds"].append(processes[variant].ask(Steps(options.steps))["seconds"])
    return list(results.values())


def _show(results: Sequence[dict[str, Any]]) -> None:
    """Print a Markdown table of loop times and memory."""
    print("one training step: plain transformers / patched by xent = ratio\n")
    print("| model | tokens | ms in a loop | peak above weights and optimizer, MiB | peak of all, MiB |")
    print("|---|---|---|---|---|")
    for plain, patched in zip(results[::2], results[1::2], strict=True):
        ratio = statistics.median(b / a for a, b in zip(plain["rounds"], patched["rounds"], strict=True))
        times = [statistics.median(each["rounds"]) * 1e3 for each in (plain, patched)]
        cells = [f"{times[0]:.4g} / {times[1]:.4g} = {ratio:.3f}"]
        for key in ("step", "total"):
            pair = [each[key] for each in (plain, patched)]
            known = None not in pair
            cells.append(
                f"{pair[0] / _MIB:.0f} / {pair[1] / _MIB:.0f} = {pair[1] / pair[0]:.2f}" if known else "unknown"
            )
        print(f"| {plain['model']} | {plain['length']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
