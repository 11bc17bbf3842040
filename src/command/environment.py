"""`python -m xent`: print versions, backends, fast paths and environment variables, as a bug report needs them."""

import importlib.metadata
import os
import platform
import sys

from xent import __version__
from xent.command.show import table
from xent.core.dispatch import backends

__all__ = ["VARIABLES", "show"]

VARIABLES = {
    "XENT_BACKEND": 'replaces backend="auto"',
    "XENT_CHECK_TARGETS": "1: look at targets on accelerators too, which synchronises",
    "XENT_PORTABLE": "1: turn the Hopper kernels off",
    "TRITON_INTERPRET": "1: Triton interprets its kernels on the CPU",
}
_LIBRARIES = ("numpy", "torch", "triton", "mlx", "mlx-lm", "transformers", "trl", "liger-kernel", "cut-cross-entropy")


def show() -> int:
    """Print versions, backends, fast paths and environment variables; return the exit status."""
    print(f"xent {__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(", ".join(_installed()) + "\n")
    rows: list[tuple[str, ...]] = [("backend", "arrays", "available", "devices", "notes")]
    for info in backends():
        rows.append((info.name, info.framework, info.reason or "yes", ", ".join(info.devices), "; ".join(info.notes)))
    print(table(rows) + "\n")
    settings = [(name, os.environ.get(name, "not set"), meaning) for name, meaning in VARIABLES.items()]
    print(table([("variable", "value", "meaning"), *settings]))
    return 0


def _installed() -> list[str]:
    """Return the installed libraries that xent works with, with their versions."""
    found = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found or [f"no library that xent knows, in {sys.prefix}"]
