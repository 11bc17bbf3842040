"""The table of backends, best first. A new backend is one folder and two lines here; nothing else names it.

The imports stand in functions, so that a backend is loaded by the first call that could use it, and as plain import
statements, because those are what torch.compile can trace.
"""

from collections.abc import Callable

from xent.backends.protocol import Backend

__all__ = ["TABLE"]


def _torch() -> Backend:
    from xent.backends.torch import BACKEND

    return BACKEND


def _numpy() -> Backend:
    from xent.backends.reference import BACKEND

    return BACKEND


TABLE: dict[str, Callable[[], Backend]] = {"torch": _torch, "numpy": _numpy}
