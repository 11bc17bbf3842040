"""The table of backends, best first: one folder and two lines here a backend (a row kernel has one in its driver too).

The imports stand in functions, so that a backend is loaded by the first call that could use it, and as plain import
statements, because those are what torch.compile can trace.
"""

from collections.abc import Callable

from xent.backends.protocol import Backend

__all__ = ["TABLE"]


def _triton() -> Backend:
    from xent.backends.triton import BACKEND

    return BACKEND


def _torch() -> Backend:
    from xent.backends.torch import BACKEND

    return BACKEND


def _metal() -> Backend:
    from xent.backends.metal import BACKEND

    return BACKEND


def _mlx() -> Backend:
    from xent.backends.mlx import BACKEND

    return BACKEND


def _numpy() -> Backend:
    from xent.backends.reference import BACKEND

    return BACKEND


TABLE: dict[str, Callable[[], Backend]] = {
    "triton": _triton,
    "torch": _torch,
    "metal": _metal,
    "mlx": _mlx,
    "numpy": _numpy,
}
