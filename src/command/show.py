"""What the commands show: versions and settings, as a bug report needs them; progress on stderr; and tables.

Progress is a bar if `rich` is installed, else lines.
"""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from xent import __version__
from xent.core.dispatch import backends

__all__ = ["VARIABLES", "environment", "progress", "table"]

_SECONDS = 5  # seconds between lines
VARIABLES = {
    "XENT_BACKEND": 'replaces backend="auto"',
    "XENT_CHECK_TARGETS": "1: look at targets on accelerators too, which synchronises",
    "XENT_PORTABLE": "1: turn the Hopper kernels off",
    "TRITON_INTERPRET": "1: Triton interprets its kernels on the CPU",
}
_LIBRARIES = ("numpy", "torch", "triton", "mlx", "mlx-lm", "transformers", "trl", "liger-kernel", "cut-cross-entropy")


def environment() -> int:
    """Print versions, backends, fast paths and environment variables; return the exit status."""
    print(f"xent {__version__}, Python {platform.python_version()}, {platform.platform()}")
    found = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    print(", ".join(found) + "\n")
    rows: list[tuple[str, ...]] = [("backend", "arrays", "available", "devices", "notes")]
    for info in backends():
        rows.append((info.name, info.framework, info.reason or "yes", ", ".join(info.devices), "; ".join(info.notes)))
    print(table(rows) + "\n")
    settings = [(name, os.environ.get(name, "not set"), meaning) for name, meaning in VARIABLES.items()]
    print(table([("variable", "value", "meaning"), *settings]))
    return 0


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with the description of each of `total` steps when the step begins."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        begun, last = 0, -float("inf")

        def tell(description: str) -> None:
            nonlocal begun, last
            begun += 1
            if monotonic() - last >= _SECONDS:
                last = monotonic()
                print(f"{begun} of {total}: {description}", file=sys.stderr, flush=True)

        yield tell
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total + 1)
        yield lambda description: bar.update(task, description=description, advance=1)


def table(rows: list[tuple[str, ...]]) -> str:
    """Return rows of cells as text in columns. The first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
