"""Run the gradient checks of this machine's backends on this machine's own hardware, and print what came of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from xent.backends import TABLE
from xent.backends.protocol import Backend
from xent.core.check.cases import option_cases
from xent.core.check.judge import Comparison, judge_case

__all__ = ["Line", "check_all", "table"]

_FUNCTIONS = ("cross_entropy", "linear_cross_entropy")


@dataclass(frozen=True)
class Line:
    """One backend, function and dtype: how many cases ran, and the comparison nearest to or beyond its bound."""

    backend: str
    device: str
    function: str
    dtype: str
    cases: int
    worst: Comparison
    failed: tuple[str, ...]


def check_all(names: list[str] | None = None, progress: Callable[[str], None] = lambda text: None) -> Iterator[Line]:
    """Check the named backends, or all that this machine can run; the reference has nothing to be compared with."""
    for name, load in TABLE.items():
        backend = load()
        if name == "numpy" or (names is not None and name not in names) or not backend.info().available:
            continue
        for device in backend.info().devices:
            for function in _FUNCTIONS:
                for dtype in backend.harness(device).dtypes:
                    progress(f"{name} on {device}: {function}, {dtype}")
                    yield _check(backend, device, function, dtype)


def _check(backend: Backend, device: str, function: str, dtype: str) -> Line:
    harness = backend.harness(device)
    cases = option_cases(function, dtype)
    judged = [(comparison, case) for case in cases for comparison in judge_case(backend, harness, case)]
    results = [comparison for comparison, _ in judged]
    worst = max(results, key=lambda result: result.error / result.bound if result.error >= 0 else float("inf"))
    failed = tuple(f"{case}: {result.output}" for result, case in judged if not result.passed)
    return Line(backend.name, device, function, dtype, len(cases), worst, failed)


def table(rows: list[tuple[str, ...]]) -> str:
    """Return rows of cells as text in columns, the first row as the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
