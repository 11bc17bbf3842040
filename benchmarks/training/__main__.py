"""Measure training steps of whole models of transformers with each implementation of the loss.

A step is a forward pass, a backward pass and a step of AdamW, with one sequence of which a quarter of the labels is
masked. Weights are random: in bfloat16 on a GPU, in float32 on a CPU. Written are tokens per second, peak memory with
weights and optimizer, and the longest sequence whose step fits into a memory limit, to within 3%. The limit counts what
PyTorch has allocated; a real GPU of that size has a little less for it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.devices import DEVICES, default_device
from benchmarks.machine import machine_facts
from benchmarks.process import NotMeasured
from benchmarks.protocol import Describe, OpenTraining
from benchmarks.training.measure import Deadline, NoTimeLeft, Plan, Result, Trainer, measure
from benchmarks.training.models import SHAPES
from benchmarks.training.plot import save_plot
from benchmarks.training.table import markdown
from benchmarks.training.variants import VARIANTS

__all__ = ["main"]

_DEFAULT_OUT = Path(__file__).resolve().parents[1] / "out"
_MODELS = {"cuda": ("llama-3.2-1b", "gemma-2-2b", "qwen3-4b"), "cpu": ("mid",)}
_QUICK = ("tiny-llama", "tiny-gemma", "tiny-qwen")
_MULTIPLE = 256
_PATIENCE = {"cuda": 120.0, "cpu": float("inf")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and show the results; return 1 if something has no result though its variant could run."""
    options = _options(arguments)
    if options.show:
        lines = [json.loads(line) for path in options.show for line in path.read_text(encoding="utf-8").splitlines()]
        results = [line for line in lines if "variant" in line]
        print(markdown(results))
        if options.plot:
            save_plot(results, _title(lines[0]["machine"]), options.plot)
        return 0
    deadline = Deadline(options.minutes)
    plans = [(plan, plan.results()) for plan in _plans(options)]
    results = [result for _, of_plan in plans for result in of_plan]
    path = options.out / f"training-{options.device}.jsonl"
    with Trainer(deadline, _PATIENCE[options.device]) as trainer:
        machine = _facts(trainer, options.device)

        def save() -> None:
            _write(path, machine, results)

        try:
            for plan, of_plan in plans:
                measure(trainer, plan, of_plan, save)
                save()
                print(f"{plan.title}: done after {deadline.spent():.0f} s", file=sys.stderr, flush=True)
        except NoTimeLeft:
            print("no time left", file=sys.stderr)
        save()
    print(markdown(results))
    print(f"\nwritten: {path}")
    return int(any(result["status"] not in ("measured", "absent") for result in results))


def _title(machine: dict[str, Any]) -> str:
    where = machine.get("gpu") or machine["cpu"]
    return f"Training steps on one {where}, torch {machine['versions']['torch']}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    add = parser.add_argument
    add("--device", choices=tuple(DEVICES), default=default_device(), help="the GPU if there is one")
    add("--models", choices=tuple(SHAPES), nargs="+", help="of 1 to 4 billion weights on a GPU, mid on a CPU")
    add("--quick", action="store_true", help="tiny models of the same classes, unless --models says otherwise")
    add("--variants", choices=tuple(VARIANTS), nargs="+", default=tuple(VARIANTS), help="all, if not given")
    add("--checkpointing", choices=("on", "off"), nargs="+", default=("on", "off"), help="first on, then off")
    add("--dtype", choices=("bfloat16", "float32"), help="the first on a GPU, the second on a CPU")
    add("--tokens", type=int, help="length of the sequence (8192 for the large models)")
    add("--steps", type=int, help="steps of a loop, if not those of the model")
    add("--rounds", type=int, help="loops of each variant, of which the median counts, if not those of the model")
    add("--limit", type=float, metavar="GIB", help="memory for the longest sequence; 0 to search none")
    add("--seconds", type=float, default=10.0, help="search no sequences whose step takes longer than this (10)")
    add("--minutes", type=float, help="stop after this time and write what was measured")
    add("--out", type=Path, default=_DEFAULT_OUT, help="folder of the results (%(default)s)")
    add("--plot", type=Path, metavar="PNG", help="with --show: draw speed against peak memory")
    add("--show", type=Path, nargs="+", metavar="JSONL", help="measure nothing, print the table of these results")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    options.models = options.models or (_QUICK if options.quick else _MODELS[options.device])
    return options


def _plans(options: argparse.Namespace) -> list[Plan]:
    """Return what to measure, the most important first."""
    plans = []
    for checkpointing in options.checkpointing:
        for name in options.models:
            shape = SHAPES[name]
            tokens = options.tokens or shape.tokens
            plans.append(
                Plan(
                    OpenTraining(name, options.device, options.dtype, checkpointing == "on"),
                    options.variants,
                    tokens,
                    options.steps or shape.steps,
                    options.rounds or shape.rounds,
                    shape.limit if options.limit is None else options.limit,
                    max(1, min(_MULTIPLE, tokens // 8)),
                    options.seconds,
                )
            )
    return plans


def _facts(trainer: Trainer, device: str) -> dict[str, Any]:
    """Return the facts about the machine and its device."""
    machine = machine_facts()
    try:
        facts = trainer.ask(Describe(device))
    except (NotMeasured, NoTimeLeft) as failure:
        return machine | {"device_facts": f"unknown: {failure}"}
    return machine | facts | {"versions": machine["versions"] | facts["versions"]}


def _write(path: Path, machine: dict[str, Any], results: Sequence[Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"machine": machine}, *results]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
