"""The table of backends, best first: one folder and two lines here a backend, which registers its steps in its driver.

The imports stand in functions, so that a backend is loaded by the first call that could use it, and as plain import
statements, because those are what torch.compile can trace.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from xent.backends.protocol import Backend

__all__ = ["ALSO", "TABLE", "dtensors_of", "plans_of", "told_to_peers"]


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
    from xent.backends.metal.torch_backend import BACKEND

    return BACKEND


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
"""Backends that serve a second framework under the name of one in the table, and in its place."""


def plans_of(array: Any) -> Any:
    """Return the module that remembers validated kinds of calls with such an array, None where there is none."""
    if not hasattr(array, "requires_grad"):
        return None
    try:
        from xent.backends.torch import plan
    except ImportError:
        return None
    return plan


def dtensors_of(array: Any, axis: Any) -> Any:
    """Return the module that takes DTensors apart if this is one with the classes, on that axis, in shards; or None."""
    if not hasattr(array, "placements"):
        return None
    try:
        from xent.backends.torch.sharded import dtensor
    except ImportError:
        return None
    return dtensor if dtensor.is_cut(array, axis) else None


def told_to_peers(vocab_parallel: Any, array: Any) -> AbstractContextManager[None]:
    """Return a context in which an error names the rank and, where that can help, reaches the ranks that wait."""
    if vocab_parallel is None or not hasattr(array, "requires_grad"):
        return nullcontext()
    try:
        from xent.backends.torch.sharded import peers
    except ImportError:
        return nullcontext()
    return peers.told(vocab_parallel, array)
