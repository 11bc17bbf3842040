"""The harness of the gradient checks for the Metal kernels on PyTorch tensors. It records that the check has passed."""

from collections.abc import Iterator
from contextlib import contextmanager

from xent.backends.metal import proof, tensors, torch_machine
from xent.backends.metal.threads import row_sizes
from xent.backends.torch.harness import TorchHarness

__all__ = ["MetalTorchHarness"]


class MetalTorchHarness(TorchHarness):
    """A `xent.backends.protocol.Harness` for the Metal kernels, without float64."""

    seconds = 0.3

    def __init__(self, device: str | None = None) -> None:
        super().__init__(device or torch_machine.DEVICES[0])
        self.dtypes = tuple(dtype for dtype in self.dtypes if dtype != "float64")
        self.kernels = ("forward", "backward")

    @contextmanager
    def watched(self) -> Iterator[set[str]]:
        """Report the kernels that have run, with the largest number of threads that each allows."""
        seen: set[str] = set()
        yield seen
        seen.update(tensors.kernels_that_ran())

    def sizes(self, dtype: str) -> dict[str, int]:
        """Return one size for each way to distribute a row over threads."""
        return row_sizes(4 if dtype == "float32" else 2)

    def passed(self) -> None:
        """Record that the check has passed, so that "auto" selects these kernels from now on."""
        proof.remember()
