"""`python -m xent check`: compare the results and gradients of each available backend with the float64 reference."""

import sys

from xent.command.check.run import Line, check_all, expected, planned, summary
from xent.command.show import progress, table
from xent.core.dispatch import backends

__all__ = ["check"]

_MOST_FAILURES = 20


def check(names: list[str], full: bool = False) -> int:
    """Check the named backends, or all that are available; print a table; return the exit status.

    If `full`, every pair of options is checked, and not only every kernel and loop.
    """
    found = backends()
    reasons = {info.name: info.reason for info in found} | {info.name: None for info in found if info.available}
    reasons["numpy"] = "the reference is what the others are held to"
    for name in names:
        reason = reasons.get(name, "there is no such backend")
        if reason is not None:
            print(f"{name} cannot be checked: {reason}", file=sys.stderr)
            return 2
    works = planned(names or None, full)
    if not works:
        print("No backend to check: neither PyTorch nor MLX is installed.", file=sys.stderr)
        return 1
    print(expected(works), flush=True)
    with progress(sum(len(cases) for work in works for cases in work.cases.values())) as tell:
        lines = list(check_all(works, tell))
    heading = ("backend", "device", "function", "dtype", "cases", "worst error", "allowed", "result")
    print(table([heading, *map(_row, lines)]))
    failed = [failure for line in lines for failure in line.failed]
    for failure in failed[:_MOST_FAILURES]:
        print(f"FAILED {failure}")
    if len(failed) > _MOST_FAILURES:
        print(f"and {len(failed) - _MOST_FAILURES} more")
    for note in sorted({note for work in works for note in work.notes}):
        print(f"Note: {note}")
    print(summary(works, lines))
    return 1 if failed else 0


def _row(line: Line) -> tuple[str, ...]:
    worst = (f"{line.worst.error:.1e}", f"{line.worst.bound:.1e}")
    result = f"{len(line.failed)} failed" if line.failed else "passed"
    return (line.backend, line.device, line.function, line.dtype, str(line.cases), *worst, result)
