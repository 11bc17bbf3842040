"""The table of backends, in order of preference. Each backend has a folder, and registers its steps with its driver.

The imports are inside functions, so that a backend is loaded by the first call that could use it. They are plain import
statements, because torch.compile can trace those.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from xent.backends.protocol import Backend

__all__ = ["ALSO", "TABLE", "dtensors_of", "rank_named"]


def _triton() -> Backend:
    from xent.backends.triton import BACKEND

    return BACKEND


def _torch() -> Backend:
    from xent.backends.torch import BACKEND

    return BACKEND


def _metal() -> Backend:
    from xent.backends.metal import BACKEND

    return BACKEND


def _metal_of_torch() -> Backend:
    from xent.backends.metal import TORCH_BACKEND

    return TORCH_BACKEND


def _mlx() -> Backend:
    from xent.backends.mlx import BACKEND

    return BACKEND


def _numpy() -> Backend:
    from xent.backends.reference import BACKEND

    return BACKEND


TABLE: dict[str, Callable[[], Backend]] = {
    "triton": _triton,
    "metal": _metal,
    "torch": _torch,
    "mlx": _mlx,
    "numpy": _numpy,
}

ALSO: dict[str, Callable[[], Backend]] = {"metal": _metal_of_torch}
"""Backends for a second framework under the name of a backend in the table, and with its priority."""


def dtensors_of(array: Any, axis: Any) -> Any:
    """Return the module for DTensors if the array is one whose classes, on that axis, are in shards; otherwise None."""
    try:
        from xent.backends.torch.shards import dtensor
    except ImportError:
        return None
    return dtensor if dtensor.is_cut(array, axis) else None


def rank_named(vocab_parallel: Any, array: Any) -> AbstractContextManager[None]:
    """Return a context in which errors of a call with shards on this array name this rank."""
    if vocab_parallel is None or not hasattr(array, "requires_grad"):
        return nullcontext()
    try:
        from xent.backends.torch.shards import ranges
    except ImportError:
        return nullcontext()
    return ranges.named(vocab_parallel)
