"""The gradient checks' interface to the Triton kernels: sizes that reach each kernel, and the kernels that ran."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from xent.backends.torch.harness import TorchHarness
from xent.backends.triton.machine import DEVICES
from xent.core.check.cases import Case
from xent.core.check.long import long_cases

__all__ = ["TritonHarness"]

_INTERPRETER = "Triton's interpreter"
_KERNEL = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)
# One for each case of `geometry.sizes`.
_CLASSES = {
    "one block": 1024,
    "several blocks": 16_384,
    "off boundaries": 16_391,
    "blocks in part": 32_000,
    "long": 65_600,
    "shared by programs": 131_072,
    "shared, off boundaries": 131_075,
}
_INTERPRETED = {"several blocks": 8192, "off boundaries": 8199}
_MOST_PROCESSES = 16  # each process has a CUDA context
_TILE = 4096  # classes, in cases with little memory per chunk


class TritonHarness(TorchHarness):
    """A `xent.backends.protocol.Harness` for the Triton kernels, without float64."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__(device or DEVICES[0])
        self.dtypes = tuple(dtype for dtype in self.dtypes if dtype != "float64")
        self._interprets = self.device == "cpu"
        self.processes = 1 if self._interprets else min(os.cpu_count() or 1, _MOST_PROCESSES)
        paths = sorted(Path(__file__).parent.rglob("*.py"))
        # Kernels for shards need several processes with a group, which the checks do not start.
        sources = (path.read_text(encoding="utf-8") for path in paths if not path.name.startswith("shard_"))
        found = (name for source in sources for name in _KERNEL.findall(source))
        self.kernels = (_INTERPRETER,) if self._interprets else tuple(found)

    @contextmanager
    def watched(self) -> Iterator[set[str]]:
        """Yield a set that is filled with the kernels of this package that PyTorch's profiler sees on the GPU."""
        seen: set[str] = set()
        if self._interprets:
            yield {_INTERPRETER}
            return
        # acc_events: keep the events without a warning that the next cycle, of which there is none, drops them.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            yield seen
        ran = {event.key for event in profiler.key_averages()}
        seen.update(name for name in self.kernels if any(key == name or key.startswith(f"{name}_") for key in ran))

    def reaching(self, function: str, dtype: str) -> list[Case]:
        """Return cases that reach each kernel of rows, with chunks, and with rows whose chunks are small."""
        if self._interprets:
            return [case for case in long_cases(function, dtype, _INTERPRETED) if case.vocabulary > 1000]
        cases = long_cases(function, dtype, _CLASSES)
        if function == "linear_cross_entropy":
            size = torch.finfo(getattr(torch, dtype)).bits // 8
            few = Case(function, (96,), _TILE, dtype, "few rows, small chunks", hidden=128, workspace=200_000 * size)
            many = replace(few, rows=(128,), name="many small chunks", workspace=4 * _TILE * 2 * size, hidden=64)
            cases += [replace(case, alone=True) for case in (few, replace(many, vocabulary=2 * _TILE))]
        return cases
