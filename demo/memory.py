"""Measure the peak memory of one loss, forward and backward pass, in a separate process.

`python -m demo.memory LOSS TOKENS WIDTH VOCABULARY DEVICE` runs in that process; it prints the bytes, or null.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from demo.gauge import make_gauge
from demo.losses import LOSSES, Loss

__all__ = ["peak_bytes"]

RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
"""Makes glibc return large blocks to the system when they are freed. Otherwise they count as in use."""

LONGEST_SECONDS = 120
"""After this time a measurement is given up."""

WARMUP_TOKENS = 64
"""Tokens of a first call, which loads libraries, starts threads and compiles kernels before the measurement."""


def peak_bytes(loss: str, tokens: int, width: int, vocabulary: int, device: torch.device) -> int | None:
    """Return the peak bytes of the named loss and its backward pass above their inputs; None if unknown or too slow."""
    shape = [str(tokens), str(width), str(vocabulary)]
    command = [sys.executable, "-m", "demo.memory", loss, *shape, str(device)]
    try:
        child = subprocess.run(
            command,
            cwd=Path(__file__).parent.parent,
            env=os.environ | RETURN_FREED_MEMORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None
    if child.returncode != 0:
        raise RuntimeError(f"the memory measurement of {loss} failed:\n{child.stderr}")
    answer: int | None = json.loads(child.stdout)
    return answer


def _measure(loss: Loss, tokens: int, width: int, vocabulary: int, device: torch.device) -> int | None:
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(vocabulary, width, device=device)).requires_grad_()
    hidden = torch.randn(tokens, width, device=device, requires_grad=True)
    target = torch.randint(vocabulary, (tokens,), device=device)
    loss(hidden[:WARMUP_TOKENS], weight, target[:WARMUP_TOKENS]).backward()
    hidden.grad = weight.grad = None
    gauge = make_gauge(device)
    gauge.start()
    loss(hidden, weight, target).backward()
    return gauge.peak()


def _main(name: str, tokens: str, width: str, vocabulary: str, device: str) -> None:
    print(json.dumps(_measure(LOSSES[name], int(tokens), int(width), int(vocabulary), torch.device(device))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
