"""Select the backend of a call: the named one, or the first in the table that can serve it. Refusals have reasons."""

import os
import warnings
from typing import Any

from xent.backends import ALSO, TABLE
from xent.backends.protocol import Backend
from xent.core.arrays import framework_of, shown
from xent.core.call import Call, array_of
from xent.core.errors import BackendError
from xent.core.spec import BackendInfo, Stats

__all__ = ["backends", "run"]

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
    return [load().info() for name in TABLE for load in (TABLE[name], ALSO.get(name)) if load is not None]


def run(call: Call, name: str) -> tuple[Any, Stats]:
    """Run the call on the backend called `name`, or with "auto" on the first that serves it."""
    return _selected(name, call).run(call)


def _selected(name: str, call: Call) -> Backend:
    """Return the backend called `name`, or for "auto" the first that can serve the call; else raise BackendError."""
    if not isinstance(name, str):
        raise TypeError(f"backend must be 'auto' or one of {', '.join(map(repr, TABLE))}, got {shown(name)}")
    framework, device = _home(call)
    if name != "auto":
        return _named(name, f"backend {name!r}", framework, call)
    name = os.environ.get("XENT_BACKEND") or "auto"
    if name != "auto":
        return _named(name, f"backend {name!r} (from the environment variable XENT_BACKEND)", framework, call)
    refusals = []
    for candidate in TABLE:
        backend = _loaded(candidate, framework)
        if backend.framework != framework:
            continue
        reason = _refusal(backend, call) or _doubt(backend)
        if reason is None:
            return backend
        refusals.append(f"{candidate}: {reason}")
        if device in backend.native_to:
            _warn_once(
                f"another backend computes this call, since xent does not use its {candidate} backend, the fastest on "
                f"{device}: {reason}"
            )
    raise BackendError(f"no backend can serve this call on {framework} arrays: " + "; ".join(refusals))


def _named(name: str, title: str, framework: str, call: Call) -> Backend:
    """Return the backend of that name, or raise BackendError; `title` is its name in error messages."""
    if name not in TABLE:
        raise BackendError(f"unknown {title}: it must be 'auto' or one of {', '.join(map(repr, TABLE))}")
    backend = _loaded(name, framework)
    if backend.framework != framework:
        others = [repr(other) for other in TABLE if _loaded(other, framework).framework == framework]
        served = " and ".join(load[name]().framework for load in (TABLE, ALSO) if name in load)
        raise BackendError(
            f"{title} takes {served} arrays and got {framework} arrays: use backend {' or '.join(others)}, or 'auto'"
            if others
            else f"{title} takes {served} arrays and got {framework} arrays, which no backend takes"
        )
    reason = _refusal(backend, call)
    if reason is not None:
        raise BackendError(f"{title} cannot serve this call: {reason}")
    return backend


def _loaded(name: str, framework: str) -> Backend:
    """Return the backend of that name; if two frameworks have one, that of `framework`."""
    backend = TABLE[name]()
    return ALSO[name]() if backend.framework != framework and name in ALSO else backend


def _doubt(backend: Backend) -> str | None:
    """Return why "auto" does not select a backend that is available, or None."""
    unproven = getattr(backend, "unproven", None)
    return None if unproven is None else unproven()


def _refusal(backend: Backend, call: Call) -> str | None:
    """Return why the backend cannot serve the call, or None."""
    missing = backend.missing()
    return backend.refuse(call) if missing is None else missing


def _home(call: Call) -> tuple[str, str]:
    """Return (framework, device type) of the call's arrays."""
    array = array_of(call)
    framework = framework_of(array)
    assert framework is not None  # validated
    return framework, array.device.type if framework == "torch" else framework


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=5)
