"""The table of backends, in order of preference, and the choice of one for a call. Refusals have reasons.

Each backend has a folder, and registers its steps with its driver. The imports are inside functions, so that a backend
is loaded by the first call that could use it. They are plain import statements, because torch.compile can trace those.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from xent.backends.protocol import Backend
from xent.core.call import Call, framework_of, shown
from xent.core.spec import Array, BackendError, BackendInfo

__all__ = ["TABLE", "backends", "dtensors_of", "rank_named", "selected"]


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
    from xent.backends.metal.torch_machine import BACKEND

    return BACKEND


def _mlx() -> Backend:
    from xent.backends.mlx import BACKEND

    return BACKEND


def _numpy() -> Backend:
    from xent.backends.reference import BACKEND

    return BACKEND


TABLE: dict[tuple[str, str], Callable[[], Backend]] = {
    ("triton", "torch"): _triton,
    ("metal", "mlx"): _metal,
    ("metal", "torch"): _metal_of_torch,
    ("torch", "torch"): _torch,
    ("mlx", "mlx"): _mlx,
    ("numpy", "numpy"): _numpy,
}
"""Name and framework of each backend."""

_warned: set[str] = set()


def backends() -> list[BackendInfo]:
    """List all backends: whether each is available or why not, versions, devices.

    This imports the framework of each backend.

    Returns
    -------
    list of BackendInfo
        In the order of preference of "auto".

    Examples
    --------
    >>> import xent
    >>> [info.name for info in xent.backends() if info.available][-1]
    'numpy'
    """
    return [load().info() for load in TABLE.values()]


def selected(name: str, call: Call, array: Array, depth: int = 2) -> Backend:
    """Return the backend called `name`, or for "auto" the first that can serve a call on this array; else raise.

    `depth`: the number of functions between the public function and this one, which a warning skips.
    """
    if not isinstance(name, str):
        raise TypeError(f"backend must be 'auto' or one of {_names()}, got {shown(name)}")
    framework: Any = framework_of(array)
    origin = ""
    if name == "auto":
        name, origin = os.environ.get("XENT_BACKEND") or "auto", " (from the environment variable XENT_BACKEND)"
    refusals, warning = [], None
    for (candidate, takes), load in TABLE.items():
        if takes != framework or name not in ("auto", candidate):
            continue
        backend = load()
        reason = backend.missing or backend.refuse(call)
        unproven: Any = getattr(backend, "unproven", None)
        if reason is None and name == "auto" and unproven is not None:
            reason = unproven()
        if reason is None:
            if warning is not None and warning not in _warned:
                _warned.add(warning)
                warnings.warn(warning, RuntimeWarning, stacklevel=depth + 3)
            return backend
        refusals.append(f"{candidate}: {reason}")
        device = array.device.type if framework == "torch" else framework
        if name == "auto" and device in backend.native_to:
            warning = (
                f"another backend computes this call, since xent does not use its {candidate} backend, the fastest on "
                f"{device}: {reason}"
            )
    if name == "auto":
        raise BackendError(f"no backend can serve this call on {framework} arrays: " + "; ".join(refusals))
    title = f"backend {name!r}{origin}"
    if refusals:
        raise BackendError(f"{title} cannot serve this call: {refusals[0].removeprefix(f'{name}: ')}")
    served = [takes for candidate, takes in TABLE if candidate == name]
    if not served:
        raise BackendError(f"unknown {title}: it must be 'auto' or one of {_names()}")
    others = " or ".join(repr(candidate) for candidate, takes in TABLE if takes == framework)
    raise BackendError(
        f"{title} takes {' and '.join(served)} arrays and got {framework} arrays: use backend {others}, or 'auto'"
    )


def _names() -> str:
    return ", ".join(map(repr, dict.fromkeys(name for name, _ in TABLE)))


def dtensors_of(array: Array, axis: Any, is_linear: bool) -> Any:
    """Return the function for DTensors if the classes of the array, on that axis, are in shards; otherwise None."""
    try:
        from xent.backends.torch.shards import dtensor
    except ImportError:
        return None
    if not dtensor.is_cut(array, axis):
        return None
    return dtensor.of_linear if is_linear else dtensor.of_logits


def rank_named(vocab_parallel: object, array: Array) -> AbstractContextManager[None]:
    """Return a context in which errors of a call with shards on this array name this rank."""
    if not hasattr(array, "requires_grad"):
        return nullcontext()
    try:
        from xent.backends.torch.shards import ranges
    except ImportError:
        return nullcontext()
    return ranges.named(vocab_parallel)
