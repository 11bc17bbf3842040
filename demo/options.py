"""The command line of the demo: options and their defaults."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from demo.device import choose_device, free_cores

__all__ = ["Options", "parse"]

SMALLEST_VOCABULARY = 512
"""Byte-pair encoding starts from 256 bytes and one end-of-text token; a smaller vocabulary has almost no merges."""


@dataclass(frozen=True)
class Options:
    """The options of a run, with all defaults filled in."""

    steps: int
    batch: int
    context: int
    vocabulary: int
    device: torch.device
    seed: int
    out: Path
    seconds: float
    """Time for the training."""
    threads: int
    """Threads of PyTorch on the CPU."""


def parse(arguments: list[str] | None = None) -> Options:
    """Parse the command line (None: that of this process) and fill in the defaults that depend on the device."""
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="Train a small transformer on the source of Python's standard library twice from the same seed, "
        "once with PyTorch's cross entropy and once with xent, and compare loss, time and memory.",
    )
    parser.add_argument(
        "--steps", type=_at_least(2), help="training steps of each run (default: 60 on a CPU, 300 else)"
    )
    parser.add_argument("--batch", type=_at_least(1), default=8, help="sequences per step (default: %(default)s)")
    parser.add_argument("--context", type=_at_least(1), default=256, help="tokens per sequence (default: %(default)s)")
    parser.add_argument(
        "--vocab",
        type=_at_least(SMALLEST_VOCABULARY),
        default=16384,
        help="entries of the vocabulary (default: %(default)s)",
    )
    parser.add_argument("--device", help="cpu, cuda or mps (default: the accelerator if there is one, else the CPU)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "out", help="folder for the picture (default: demo/out)"
    )
    parser.add_argument(
        "--seconds", type=float, default=75.0, help="end the training after this time (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=_at_least(1), help="threads on the CPU (default: the cores that other programs leave free)"
    )
    given = parser.parse_args(arguments)
    try:
        device = choose_device(given.device)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    return Options(
        steps=given.steps or (60 if device.type == "cpu" else 300),
        batch=given.batch,
        context=given.context,
        vocabulary=given.vocab,
        device=device,
        seed=given.seed,
        out=given.out,
        seconds=given.seconds,
        threads=given.threads or free_cores(),
    )


def _at_least(smallest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, got {value}")
        return value

    return number
