"""The log of the kernels that Triton compiles, so that a person knows what a first call waits for.

Triton calls a listener for each kernel that it compiles or finds in its cache on disk.
"""

import logging
import os
from typing import Any

import triton

__all__ = ["listen"]

_LONG = 5.0
_logger = logging.getLogger("xent")
_former = triton.knobs.compilation.listener
_seconds = [0.0]
"""Of all compilations of the process."""

if os.environ.get("XENT_LOG") == "1":
    _logger.addHandler(logging.StreamHandler())
    _logger.setLevel(logging.INFO)


def listen(*, src: Any, times: Any, cache_hit: bool, **facts: Any) -> None:
    """Log a kernel of this package that was compiled, and once that compilations took more than 5 s."""
    if _former is not None:
        _former(src=src, times=times, cache_hit=cache_hit, **facts)
    function = getattr(src, "fn", None)
    if cache_hit or not getattr(function, "__module__", "").startswith("xent."):
        return
    seconds, before = times.total / 1e6, _seconds[0]
    _seconds[0] += seconds
    _logger.info("Compiled %s in %.2f s.", src.name, seconds)
    if before <= _LONG < _seconds[0]:
        _logger.warning(
            "xent has compiled Triton kernels for %.0f s. This happens once: later processes find them in Triton's "
            "cache. XENT_LOG=1 lists them.",
            _seconds[0],
        )


triton.knobs.compilation.listener = listen
