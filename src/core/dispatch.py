"""Select the backend of a call: the named one, or the first in the table that can serve it. Refusals have reasons."""

import os
import warnings
from collections.abc import Callable
from typing import Any

from xent.backends import ALSO, TABLE, dtensors_of, rank_named
from xent.backends.protocol import Backend
from xent.core.arrays import framework_of, shown
from xent.core.call import Call
from xent.core.describe import described
from xent.core.spec import BackendError, BackendInfo, Stats

__all__ = ["backends", "evaluate"]

_SOURCES = ("logits", "input", "linear_weight")
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


def evaluate(function: Callable[..., Any], defaults: dict[str, Any], passed: dict[str, Any]) -> Any:
    """Return the result of a public function on the backend that its arguments name, or on the first that serves it.

    DTensors call the function again with their local parts.
    """
    arguments = defaults | passed
    source = [arguments[name] for name in _SOURCES if name in arguments]
    if hasattr(source[-1], "placements"):
        shards = dtensors_of(source[-1], arguments.get("axis", 0))
        if shards is not None:
            cut = shards.of_logits if len(source) == 1 else shards.of_linear
            return cut(function, *source, {name: arguments[name] for name in arguments if name not in _SOURCES})
    with rank_named(arguments["vocab_parallel"], source[0]):
        call = described(arguments, passed)
        loss, found = _selected(arguments["backend"], call, source[0]).run(call)
    stats = call.options.stats
    if not call.options.accuracy_of_rows:
        return (loss, found) if stats else loss
    results = [0 - loss]  # log-probabilities
    if "entropy" in stats:
        results.append(found.entropy)
    asked = {name: getattr(found, name) for name in stats if name != "entropy"}
    if asked:
        results.append(Stats(**asked))
    return results[0] if len(results) == 1 else tuple(results)


def _selected(name: str, call: Call, array: Any) -> Backend:
    """Return the backend called `name`, or for "auto" the first that can serve a call on this array; else raise."""
    if not isinstance(name, str):
        raise TypeError(f"backend must be 'auto' or one of {', '.join(map(repr, TABLE))}, got {shown(name)}")
    framework: Any = framework_of(array)
    origin = ""
    if name == "auto":
        name, origin = os.environ.get("XENT_BACKEND") or "auto", " (from the environment variable XENT_BACKEND)"
    if name != "auto":
        return _named(name, f"backend {name!r}{origin}", framework, call)
    refusals = []
    for candidate in TABLE:
        backend = _loaded(candidate, framework)
        if backend.framework != framework:
            continue
        reason = backend.missing() or backend.refuse(call)
        unproven: Any = getattr(backend, "unproven", None)
        if reason is None and unproven is not None:
            reason = unproven()
        if reason is None:
            return backend
        refusals.append(f"{candidate}: {reason}")
        device = array.device.type if framework == "torch" else framework
        if device in backend.native_to:
            message = (
                f"another backend computes this call, since xent does not use its {candidate} backend, the fastest on "
                f"{device}: {reason}"
            )
            if message not in _warned:
                _warned.add(message)
                warnings.warn(message, RuntimeWarning, stacklevel=4)
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
        )
    reason = backend.missing() or backend.refuse(call)
    if reason is not None:
        raise BackendError(f"{title} cannot serve this call: {reason}")
    return backend


def _loaded(name: str, framework: str) -> Backend:
    """Return the backend of that name; if two frameworks have one, that of `framework`."""
    backend = TABLE[name]()
    return ALSO[name]() if backend.framework != framework and name in ALSO else backend
