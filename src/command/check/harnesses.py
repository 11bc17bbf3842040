"""The harness of each backend for the gradient checks: a line here for each line of `xent.backends.TABLE`.

A framework is imported by the first harness that needs it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from xent.backends.protocol import Backend
from xent.command.check.harness import Harness, Operand

__all__ = ["harness_of"]


def harness_of(backend: Backend, device: str | None = None) -> Harness[Operand]:
    """Return the harness of a backend, for `device` or by default the best available device.

    The reference has none: it is proved by finite differences, and the checks compare other backends with it.
    """
    return _HARNESSES[backend.name, backend.framework](device)


def _triton(device: str | None) -> Harness[Operand]:
    from xent.command.check.triton_harness import TritonHarness

    return TritonHarness(device)


def _torch(device: str | None) -> Harness[Operand]:
    from xent.command.check.torch_harness import TorchHarness

    return TorchHarness(device)


def _mlx(device: str | None) -> Harness[Operand]:
    from xent.backends.mlx import BACKEND
    from xent.command.check.mlx_harness import MlxHarness

    return MlxHarness(device or BACKEND.devices()[0])


def _metal(device: str | None) -> Harness[Operand]:
    from xent.backends.metal import BACKEND
    from xent.command.check.mlx_harness import MlxHarness

    return _of_metal(MlxHarness(device or BACKEND.devices()[0]))


def _metal_of_torch(device: str | None) -> Harness[Operand]:
    from xent.backends.metal.torch_machine import DEVICES, PROOF
    from xent.command.check.torch_harness import TorchHarness

    harness = _of_metal(TorchHarness(device or DEVICES[0]))
    harness.passed = PROOF.remember  # type: ignore[method-assign]
    return harness


def _of_metal(harness: Harness[Operand]) -> Harness[Operand]:
    """Return the harness of a framework for Metal's kernels: without float64, and with rows that reach every loop."""
    from xent.backends.metal.sources import RAN, row_sizes

    @contextmanager
    def watched() -> Iterator[set[str]]:
        RAN.clear()
        seen: set[str] = set()
        yield seen
        seen.update(RAN)

    harness.dtypes, harness.kernels, harness.seconds = ("float32", "bfloat16", "float16"), ("forward", "backward"), 0.3
    harness.watched = watched  # type: ignore[method-assign]
    harness.sizes = lambda dtype: row_sizes(4 if dtype == "float32" else 2)  # type: ignore[method-assign]
    return harness


_HARNESSES = {
    ("triton", "torch"): _triton,
    ("metal", "mlx"): _metal,
    ("metal", "torch"): _metal_of_torch,
    ("torch", "torch"): _torch,
    ("mlx", "mlx"): _mlx,
}
