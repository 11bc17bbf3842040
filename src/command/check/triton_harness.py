"""The gradient checks' interface to the Triton kernels: sizes that reach each kernel, and the kernels that ran."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from xent.backends.triton import machine
from xent.command.check.torch_harness import TorchHarness

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


class TritonHarness(TorchHarness):
    """A `xent.command.check.harness.Harness` for the Triton kernels, without float64."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__(device or machine.DEVICES[0])
        self.dtypes = tuple(dtype for dtype in self.dtypes if dtype != "float64")
        self._interprets = self.device == "cpu"
        self.seconds = 0.8 if self._interprets else 5.0  # to compile takes most of it
        self.processes = 1 if self._interprets else min(os.cpu_count() or 1, _MOST_PROCESSES)
        paths = sorted(Path(machine.__file__).parent.rglob("*.py"))
        names = (name for path in paths for name in _KERNEL.findall(path.read_text(encoding="utf-8")))
        self.kernels = (_INTERPRETER,) if self._interprets else tuple(names)

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

    def sizes(self, dtype: str) -> dict[str, int]:
        """Return sizes that reach each kernel of rows."""
        return _INTERPRETED if self._interprets else _CLASSES

    def passed(self) -> None:
        """Record that the kernels are proved, if this is a GPU for which they were only compiled."""
        if machine.UNTRIED is not None:
            machine.PROOF.remember()
