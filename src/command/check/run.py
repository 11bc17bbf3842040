"""`python -m xent check`: run the gradient checks of this machine's backends on its own hardware, and report them."""

import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from operator import itemgetter
from typing import Any

from xent.backends import ALSO, TABLE
from xent.backends.harness import Harness
from xent.backends.protocol import Backend
from xent.command.check.case import Case
from xent.command.check.judge import Comparison, judge_case
from xent.command.check.plan import FUNCTIONS, pairs, reaching
from xent.command.show import progress, table
from xent.core.dispatch import backends

__all__ = ["Line", "Work", "cases_of", "check", "check_all", "expected", "planned", "summary"]

_CASES_OF_A_PROCESS = 8  # cases sent to a process at a time; neighbouring cases use the same compiled kernels
_MOST_FAILURES = 20
_NOTHING = Comparison("", 0.0, 1.0)
Kind = tuple[str, str]
"""(function, dtype)"""


@dataclass(frozen=True)
class Line:
    """Results for one backend, function and dtype: number of cases, and the comparison with the largest error/bound."""

    backend: str
    device: str
    function: str
    dtype: str
    cases: int
    worst: Comparison
    failed: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Work:
    """The cases to check for one backend on one device, the names of the kernels that ran, and notes."""

    backend: Backend
    device: str
    harness: Harness[Any]
    cases: dict[Kind, Sequence[Case]]
    full: bool = False
    """Whether the cases have every pair of options."""
    seen: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)
    """Warnings of the backend, for example about a fast path that is off. They are no failures."""

    def __str__(self) -> str:
        return f"{self.backend.name} on {self.device}"

    def __len__(self) -> int:
        return sum(map(len, self.cases.values()))


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
    with progress(sum(map(len, works))) as tell:
        lines = list(check_all(works, tell))
    rows: list[tuple[str, ...]] = [
        ("backend", "device", "function", "dtype", "cases", "worst error", "allowed", "result")
    ]
    for line in lines:
        result = f"{len(line.failed)} failed" if line.failed else "passed"
        worst = (f"{line.worst.error:.1e}", f"{line.worst.bound:.1e}")
        rows.append((line.backend, line.device, line.function, line.dtype, str(line.cases), *worst, result))
    print(table(rows))
    failed = [failure for line in lines for failure in line.failed]
    for failure in failed[:_MOST_FAILURES]:
        print(f"FAILED {failure}")
    if len(failed) > _MOST_FAILURES:
        print(f"and {len(failed) - _MOST_FAILURES} more")
    for note in sorted({note for work in works for note in work.notes}):
        print(f"Note: {note}")
    print(summary(works, lines))
    return 1 if failed else 0


def planned(names: list[str] | None = None, full: bool = False) -> list[Work]:
    """Return the checks of the named backends, or of all available backends except the reference."""
    found = []
    for name, load in (*TABLE.items(), *ALSO.items()):
        backend = load()
        if name == "numpy" or (names is not None and name not in names) or not backend.info().available:
            continue
        for device in backend.info().devices:
            harness = backend.harness(device)
            kinds = [(function, dtype) for function in FUNCTIONS for dtype in harness.dtypes]
            found.append(Work(backend, device, harness, {kind: cases_of(harness, *kind, full) for kind in kinds}, full))
    return found


def cases_of(harness: Harness[Any], function: str, dtype: str, full: bool = False) -> Sequence[Case]:
    """Return the cases that reach every kernel and loop of this device; if `full`, every pair of options as well."""
    return reaching(harness, function, dtype) + (pairs(function, dtype) if full else [])


def expected(works: Sequence[Work]) -> str:
    """Return the number of cases, and about how long they take."""
    seconds = sum(len(work) * work.harness.seconds / work.harness.processes for work in works) + 1
    time = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    return f"{sum(map(len, works))} cases for {', '.join(map(str, works))}: about {time}."


def check_all(works: Sequence[Work], tell: Callable[[str], None] = lambda text: None) -> Iterator[Line]:
    """Run the checks, and call `tell` with each case. If a full check of a backend passes, tell its harness."""
    for work in works:
        good = True
        for (function, dtype), group in groupby(_parts(work, tell), key=itemgetter(0)):
            comparisons: list[Comparison] = []
            failures: list[str] = []
            for _, (found, failed, seen, notes) in group:
                comparisons += found
                failures += failed
                work.seen.update(seen)
                work.notes.update(notes)
            worst = max(comparisons, key=_nearness, default=_NOTHING)
            good = good and not failures
            count = len(work.cases[function, dtype])
            yield Line(work.backend.name, work.device, function, dtype, count, worst, tuple(failures))
        if good and work.full and not work.notes:
            work.harness.passed()


_Part = tuple[list[Comparison], list[str], set[str], set[str]]
"""What some cases found: comparisons, descriptions of failures, kernels that ran, and warnings."""


def _parts(work: Work, tell: Callable[[str], None]) -> Iterator[tuple[Kind, _Part]]:
    """Judge a few cases at a time, in this process or in several, each of which compiles its own kernels."""
    count = work.harness.processes
    some = 1 if count == 1 else _CASES_OF_A_PROCESS
    parts = [(kind, cases[at : at + some]) for kind, cases in work.cases.items() for at in range(0, len(cases), some)]
    # Ctrl-C, which the terminal sends to all processes, ends these silently.
    silently = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pool = None if count == 1 else ProcessPoolExecutor(count, get_context("spawn"), silently)
    names = work.backend.name, work.device
    sent = [] if pool is None else [pool.submit(_judged_there, *names, cases) for _, cases in parts]
    try:
        for place, (kind, cases) in enumerate(parts):
            for case in cases:
                tell(f"{work}: {case}")
            try:
                yield kind, _judged(work.backend, work.harness, cases) if pool is None else sent[place].result()
            except Exception as error:  # a process died
                yield kind, ([], [f"{case}: {type(error).__name__}: {error}" for case in cases], set(), set())
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _judged_there(name: str, device: str, cases: Sequence[Case]) -> _Part:
    """Judge cases in a worker process."""
    backend = (TABLE | ALSO)[name]()
    return _judged(backend, backend.harness(device), cases)


def _judged(backend: Backend, harness: Harness[Any], cases: Sequence[Case]) -> _Part:
    """Judge cases. An exception is a failure; a warning, which says that other code ran, is a note."""
    comparisons: list[Comparison] = []
    failed: list[str] = []
    with harness.watched() as seen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        for case in cases:
            try:
                found = judge_case(backend, harness, case)
            except Exception as error:
                failed.append(f"{case}: {type(error).__name__}: {error}")
                continue
            comparisons += found
            failed += [f"{case}: {result.output}" for result in found if not result.passed]
    return comparisons, failed, seen, {str(one.message) for one in caught if "xent" in str(one.message)}


def _nearness(result: Comparison) -> float:
    return result.error / result.bound if result.error >= 0 else float("inf")


def summary(works: Sequence[Work], lines: Sequence[Line]) -> str:
    """Return one sentence with the number of passed or failed cases and the kernels that ran."""
    count, failed = sum(line.cases for line in lines), sum(len(line.failed) for line in lines)
    result = f"All {count} cases passed" if not failed else f"{failed} of {count} cases failed"
    return f"{result}; {'; '.join(map(_ran, works))}."


def _ran(work: Work) -> str:
    if not work.seen:
        return f"which kernels ran as {work} is not known"
    left = [name for name in work.harness.kernels if not any(seen.startswith(name) for seen in work.seen)]
    not_reached = f" (not reached: {', '.join(left)})" if left else ""
    return f"{work} ran {', '.join(sorted(work.seen))}{not_reached}"
