"""`python -m xent` lists the backends; `python -m xent check` proves the gradients of those this machine can run."""

import argparse
import os
import sys

from xent import __version__
from xent.core.check.progress import progress
from xent.core.check.report import Line, check_all, planned, summary, table
from xent.core.dispatch import backends

__all__ = ["main"]

_MOST_FAILURES = 20


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m xent", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command")
    check = commands.add_parser("check", help="compare loss and gradients of each backend with the float64 reference")
    check.add_argument("backend", nargs="*", help="names of backends; all that are available if none is given")
    parsed = parser.parse_args(arguments)
    return _check(parsed.backend) if parsed.command == "check" else _list()


def _list() -> int:
    rows: list[tuple[str, ...]] = [("backend", "arrays", "available", "devices", "versions")]
    for info in backends():
        versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
        rows.append((info.name, info.framework, info.reason or "yes", ", ".join(info.devices), versions))
    print(table(rows))
    chosen = os.environ.get("XENT_BACKEND")
    if chosen:
        print(f'XENT_BACKEND={chosen} takes the place of backend="auto"')
    return 0


def _check(names: list[str]) -> int:
    found = backends()
    reasons = {info.name: info.reason for info in found} | {info.name: None for info in found if info.available}
    reasons["numpy"] = "the reference is what the others are held to"
    for name in names:
        reason = reasons.get(name, "there is no such backend")
        if reason is not None:
            print(f"{name} cannot be checked: {reason}", file=sys.stderr)
            return 2
    works = planned(names or None)
    if not works:
        print("No backend to check: neither PyTorch nor MLX is installed.", file=sys.stderr)
        return 1
    total = sum(len(cases) for work in works for both in work.cases.values() for cases in both)
    with progress(total) as tell:
        lines = list(check_all(works, tell))
    heading = ("backend", "device", "function", "dtype", "cases", "worst error", "allowed", "result")
    print(table([heading, *map(_row, lines)]))
    failed = [failure for line in lines for failure in line.failed]
    for failure in failed[:_MOST_FAILURES]:
        print(f"FAILED {failure}")
    if len(failed) > _MOST_FAILURES:
        print(f"and {len(failed) - _MOST_FAILURES} more")
    print(summary(works, lines))
    return 1 if failed else 0


def _row(line: Line) -> tuple[str, ...]:
    worst = (f"{line.worst.error:.1e}", f"{line.worst.bound:.1e}")
    result = f"{len(line.failed)} failed" if line.failed else "passed"
    return (line.backend, line.device, line.function, line.dtype, str(line.cases), *worst, result)


if __name__ == "__main__":
    sys.exit(main())
