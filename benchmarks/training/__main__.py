"""Measure a training step of a whole model, as transformers made it and patched by xent, side by side.

On a GPU the model has the shape of Llama-3.2-1B, in bfloat16; on a CPU it is a mid-size one, in float32. Weights are
random. Writes the numbers and a picture of memory against sequence length to benchmarks/out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.training.models import MODELS
from benchmarks.training.plot import save_plot

_ROOT = Path(__file__).resolve().parents[2]
_LENGTHS = {"cuda": [1024, 2048, 4096, 8192], "cpu": [256, 512, 1024, 2048]}
_MIB = 2**20


def main() -> int:
    """Measure, show and write."""
    options = _options()
    results = []
    for length in options.lengths:
        for variant in ("plain", "patched"):
            question = {
                "model": options.model,
                "variant": variant,
                "length": length,
                "device": options.device,
                "dtype": options.dtype,
                "checkpointing": options.checkpointing,
                "steps": options.steps,
            }
            answer = _ask(question)
            results.append({**question, **answer})
            print(f"{length} tokens, {variant}: {json.dumps(answer)}", file=sys.stderr, flush=True)
    _show(results)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"training-{options.model}-{options.device}{'-checkpointing' if options.checkpointing else ''}"
    stem.with_suffix(".jsonl").write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    title = f"Llama-3.2-1B's shape, {options.dtype}" if options.model == "1b" else f"{options.model}, {options.dtype}"
    save_plot(results, title, stem.with_suffix(".png"))
    print(f"written: {stem}.jsonl, {stem}.png")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="the GPU if there is one")
    parser.add_argument("--model", choices=tuple(MODELS), help="1b on a GPU, mid on a CPU, if not given")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="the first on a GPU, the second on a CPU")
    lengths = "; ".join(f"{', '.join(map(str, each))} on {device}" for device, each in _LENGTHS.items())
    parser.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS", help=f"sequence lengths: {lengths}")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, of which the median counts (5)")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--out", type=Path, default=_ROOT / "benchmarks" / "out", help="folder (benchmarks/out)")
    options = parser.parse_args()
    if options.device is None:
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = options.device == "cuda"
    options.model = options.model or ("1b" if on_gpu else "mid")
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    options.lengths = options.lengths or _LENGTHS[options.device]
    return options


def _ask(question: dict[str, Any]) -> dict[str, Any]:
    """Measure in a new process; glibc is told to give freed memory back, or it would hide from the peak."""
    command = [sys.executable, "-m", "benchmarks.training.worker", json.dumps(question)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
    run = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise SystemExit(f"{question['variant']}, {question['length']} tokens: failed\n{run.stderr}")
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


def _show(results: list[dict[str, Any]]) -> None:
    columns = {
        "peak above weights and optimizer, MiB": ("step", _MIB, ".0f"),
        "peak of all, MiB": ("total", _MIB, ".0f"),
        "seconds": ("seconds", 1, ".3f"),
    }
    print("one training step: plain transformers / patched by xent = ratio")
    print("| tokens |", *(f"{heading} |" for heading in columns))
    print("|---|", *("---|" for _ in columns), sep="")
    for plain, patched in zip(results[::2], results[1::2], strict=True):
        cells = []
        for key, scale, form in columns.values():
            pair = [value / scale for value in (plain[key], patched[key]) if value is not None]
            known = len(pair) == 2
            cells.append(f"{pair[0]:{form}} / {pair[1]:{form}} = {pair[1] / pair[0]:.2f}" if known else "unknown")
        print(f"| {plain['length']} |", *(f"{cell} |" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
