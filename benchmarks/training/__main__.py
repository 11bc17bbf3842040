"""Measure training steps of whole models of transformers with each implementation of the loss.

A step is a forward pass, a backward pass and a step of AdamW, with one sequence of which a quarter of the labels is
masked. Weights are random: in bfloat16 on a GPU, in float32 on a CPU. Written are tokens per second, peak memory with
weights and optimizer, and the longest sequence whose step fits into a memory limit, to within 3%. The limit counts what
PyTorch has allocated; a real GPU of that size has a little less for it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.devices import DEVICES, default_device
from benchmarks.facts import machine_facts, merge
from benchmarks.plot import save_training_plot
from benchmarks.process import NotMeasured
from benchmarks.tables import training_table
from benchmarks.training.measure import NoTimeLeft, Trainer, measure, start_results
from benchmarks.training.variants import VARIANTS
from benchmarks.training.worker import MODELS

__all__ = ["main"]

_DEFAULT_OUT = Path(__file__).resolve().parents[1] / "out"
_USUAL = {"cuda": ("llama-3.2-1b", "gemma-2-2b", "qwen3-4b"), "cpu": ("mid",)}
_QUICK = ("tiny-llama", "tiny-gemma", "tiny-qwen")
_MULTIPLE = 256
_PATIENCE = {"cuda": 120.0, "cpu": math.inf}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and show the results; return 1 if something has no result though its variant could run."""
    options = _options(arguments)
    if options.show:
        lines = [json.loads(line) for path in options.show for line in path.read_text(encoding="utf-8").splitlines()]
        results = [line for line in lines if "variant" in line]
        print(training_table(results).markdown())
        if options.plot:
            machine = lines[0]["machine"]
            title = (
                f"Training steps on one {machine.get('gpu') or machine['cpu']}, torch {machine['versions']['torch']}"
            )
            save_training_plot(results, title, options.plot)
        return 0
    models = {
        (name, checkpointing): start_results(
            options.variants,
            model=name,
            device=options.device,
            dtype=options.dtype,
            checkpointing=checkpointing == "on",
            tokens=options.tokens or MODELS[name]["tokens"],
            limit=MODELS[name]["limit"] if options.limit is None else options.limit,
        )
        for checkpointing in options.checkpointing
        for name in options.models
    }
    results = [result for of_model in models.values() for result in of_model]
    path = options.out / f"training-{options.device}.jsonl"
    trainer = Trainer(options.device, options.minutes, _PATIENCE[options.device])
    try:
        machine = _facts(trainer)

        def save() -> None:
            options.out.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(line) + "\n" for line in [{"machine": machine}, *results])
            path.write_text(lines, encoding="utf-8")

        save()
        for (name, checkpointing), of_model in models.items():
            measure(
                trainer,
                of_model,
                save,
                steps=options.steps or MODELS[name]["steps"],
                rounds=options.rounds or MODELS[name]["rounds"],
                multiple=max(1, min(_MULTIPLE, of_model[0]["tokens"] // 8)),
                most_seconds=options.seconds,
            )
            save()
            print(f"{name}, checkpointing {checkpointing}: done", file=sys.stderr, flush=True)
    except NoTimeLeft:
        print("no time left", file=sys.stderr)
        save()
    finally:
        trainer.close()
    print(training_table(results).markdown())
    print(f"\nwritten: {path}")
    return int(any(result["status"] not in ("measured", "absent") for result in results))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    add = parser.add_argument
    add("--device", choices=tuple(DEVICES), default=default_device(), help="the GPU if there is one")
    add("--models", choices=tuple(MODELS), nargs="+", help="of 1 to 4 billion weights on a GPU, mid on a CPU")
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
    options.models = options.models or (_QUICK if options.quick else _USUAL[options.device])
    return options


def _facts(trainer: Trainer) -> dict[str, Any]:
    """Return the facts about the machine and its device."""
    try:
        return merge(machine_facts(), trainer.ask("describe"))
    except (NotMeasured, NoTimeLeft) as failure:
        return machine_facts() | {"device_facts": f"unknown: {failure}"}


if __name__ == "__main__":
    sys.exit(main())
