"""Run the gradient checks of this machine's backends on its own hardware, and report the results."""

import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from multiprocessing import get_context
from operator import itemgetter
from typing import Any

from xent.backends import ALSO, TABLE
from xent.backends.protocol import Backend, Harness
from xent.command.check.case import Case
from xent.command.check.judge import Comparison, judge_case
from xent.command.check.plan import FUNCTIONS, pairs, reaching

__all__ = ["Line", "Part", "Work", "cases_of", "check_all", "expected", "planned", "summary"]

_CASES_OF_A_PROCESS = 8  # cases sent to a process at a time; neighbouring cases use the same compiled kernels
_NOTHING = Comparison("", 0.0, 1.0)
Kind = tuple[str, str]
"""(function, dtype)"""


@dataclass(frozen=True)
class Part:
    """What some cases found: comparisons, descriptions of failures, kernels that ran, and warnings."""

    comparisons: list[Comparison] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)


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
    seconds = sum(_count(work) * work.harness.seconds / work.harness.processes for work in works) + 1
    time = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    return f"{sum(map(_count, works))} cases for {', '.join(map(str, works))}: about {time}."


def _count(work: Work) -> int:
    return sum(map(len, work.cases.values()))


def check_all(works: Sequence[Work], tell: Callable[[str], None] = lambda text: None) -> Iterator[Line]:
    """Run the checks, and call `tell` with each case. If a full check of a backend passes, tell its harness."""
    for work in works:
        good = True
        for (function, dtype), group in groupby(_parts(work, tell), key=itemgetter(0)):
            parts = [part for _, part in group]
            worst = max((result for part in parts for result in part.comparisons), key=_nearness, default=_NOTHING)
            failed = tuple(failure for part in parts for failure in part.failed)
            for part in parts:
                work.seen.update(part.seen)
                work.notes.update(part.notes)
            good = good and not failed
            count = len(work.cases[function, dtype])
            yield Line(work.backend.name, work.device, function, dtype, count, worst, failed)
        if good and work.full and not work.notes:
            work.harness.passed()


def _parts(work: Work, tell: Callable[[str], None]) -> Iterator[tuple[Kind, Part]]:
    """Judge a few cases at a time, in this process or in several, each of which compiles its own kernels."""
    alone, some = work.harness.processes == 1, _CASES_OF_A_PROCESS
    if alone:
        for kind, cases in work.cases.items():
            for case in cases:
                tell(f"{work}: {case}")
                yield kind, _judged(work, [case])
        return
    parts = [(kind, cases[at : at + some]) for kind, cases in work.cases.items() for at in range(0, len(cases), some)]
    pool = ProcessPoolExecutor(work.harness.processes, get_context("spawn"), _end_at_interrupt)
    try:
        sent = [pool.submit(_judged_there, work.backend.name, work.device, cases) for _, cases in parts]
        for (kind, cases), future in zip(parts, sent, strict=True):
            try:
                part = future.result()
            except Exception as error:  # this includes a process that died
                part = Part(failed=[f"{case}: {type(error).__name__}: {error}" for case in cases])
            for case in cases:
                tell(f"{work}: {case}")
            yield kind, part
    finally:
        pool.shutdown(cancel_futures=True)


def _judged_there(name: str, device: str, cases: Sequence[Case]) -> Part:
    """Judge cases in a worker process."""
    return _judged(_work_of(name, device), cases)


@cache
def _work_of(name: str, device: str) -> Work:
    backend = (TABLE | ALSO)[name]()
    return Work(backend, device, backend.harness(device), {})


def _end_at_interrupt() -> None:
    """Let Ctrl-C, which the terminal sends to all processes, end this process silently."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _judged(work: Work, cases: Sequence[Case]) -> Part:
    """Judge cases. An exception is a failure; a warning, which says that other code ran, is a note."""
    part = Part()
    with work.harness.watched() as seen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        for case in cases:
            try:
                found = judge_case(work.backend, work.harness, case)
            except Exception as error:
                part.failed.append(f"{case}: {type(error).__name__}: {error}")
                continue
            part.comparisons.extend(found)
            part.failed.extend(f"{case}: {result.output}" for result in found if not result.passed)
    part.seen.update(seen)
    part.notes.update(str(one.message) for one in caught if "xent" in str(one.message))
    return part


def _nearness(result: Comparison) -> float:
    return result.error / result.bound if result.error >= 0 else float("inf")


def summary(works: Sequence[Work], lines: Sequence[Line]) -> str:
    """Return one sentence with the number of passed or failed cases and the kernels that ran."""
    count, failed = sum(line.cases for line in lines), sum(len(line.failed) for line in lines)
    result = f"All {count} cases passed" if not failed else f"{failed} of {count} cases failed"
    return f"{result}; {'; '.join(_ran(work) for work in works)}."


def _ran(work: Work) -> str:
    if not work.seen:
        return f"which kernels ran as {work} is not known"
    left = [name for name in work.harness.kernels if not any(seen.startswith(name) for seen in work.seen)]
    not_reached = f" (not reached: {', '.join(left)})" if left else ""
    return f"{work} ran {', '.join(sorted(work.seen))}{not_reached}"
