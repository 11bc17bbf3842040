"""What the commands show: progress on stderr, as a bar if `rich` is installed, else in lines; and tables."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

__all__ = ["progress", "table"]

_SECONDS = 5  # seconds between lines


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with the description of each of `total` steps when the step begins."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield _lines(total)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total + 1)
        yield lambda description: bar.update(task, description=description, advance=1)


def _lines(total: int) -> Callable[[str], None]:
    begun, last = 0, -float("inf")

    def tell(description: str) -> None:
        nonlocal begun, last
        begun += 1
        if monotonic() - last >= _SECONDS:
            last = monotonic()
            print(f"{begun} of {total}: {description}", file=sys.stderr, flush=True)

    return tell


def table(rows: list[tuple[str, ...]]) -> str:
    """Return rows of cells as text in columns. The first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
