"""Run the gradient checks of this machine's backends on its own hardware, and report the results."""

import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from typing import Any

from xent.backends import ALSO, TABLE
from xent.backends.protocol import Backend, Harness
from xent.core.check.cases import LOSSES, Case, option_cases
from xent.core.check.divergence_cases import DivergenceCase, divergence_cases
from xent.core.check.divergence_judge import judge_divergence
from xent.core.check.judge import Comparison, judge_case
from xent.core.check.shapes import shape_cases

__all__ = ["Line", "Work", "cases_of", "check_all", "planned", "summary", "table"]

_FUNCTIONS = (*LOSSES, "log_probs", "linear_log_probs", "divergence", "linear_divergence")
_DTYPES = ("float32", "bfloat16", "float16")
_CASES_OF_A_PROCESS = 8  # cases sent to a process at a time; neighbouring cases use the same compiled kernels
AnyCase = Case | DivergenceCase
Judged = tuple[list[Comparison], list[str]]
"""The comparisons of a case, and the descriptions of its failures."""
_NOTHING = Comparison("", 0.0, 1.0)


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
    """The cases to check for one backend on one device, and the names of the kernels that ran."""

    backend: Backend
    device: str
    harness: Harness[Any]
    cases: dict[tuple[str, str], tuple[Sequence[AnyCase], Sequence[AnyCase]]]
    """(function, dtype) -> (the cases that every backend has, the cases for this device's kernels)."""
    seen: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.backend.name} on {self.device}"


def planned(names: list[str] | None = None) -> list[Work]:
    """Return the checks of the named backends, or of all available backends except the reference."""
    found = []
    for name, load in (*TABLE.items(), *ALSO.items()):
        backend = load()
        if name == "numpy" or (names is not None and name not in names) or not backend.info().available:
            continue
        for device in backend.info().devices:
            harness = backend.harness(device)
            kinds = [(function, dtype) for function in _FUNCTIONS for dtype in harness.dtypes]
            found.append(Work(backend, device, harness, {kind: cases_of(harness, *kind) for kind in kinds}))
    return found


def cases_of(harness: Harness[Any], function: str, dtype: str) -> tuple[Sequence[AnyCase], Sequence[AnyCase]]:
    """Return the cases that every backend has, and those that reach the kernels and loops of this device.

    The test matrix has all cases in all dtypes. Here each dtype, option and reduction compiles kernels, which takes
    most of the time. So float32 and bfloat16 get each option with one reduction, which differs between the two, and
    float16 gets a subset.
    """
    if function.endswith("divergence"):
        cases = divergence_cases(function, dtype)
        return [], cases if dtype == "float64" else cases[_DTYPES.index(dtype) % 2 :: 2 if dtype != "float16" else 4]
    everywhere = option_cases(function, dtype) + shape_cases(function, dtype)
    reaching = harness.reaching(function, dtype)
    if dtype == "float32":
        return _in_turn(everywhere, 0), reaching[::2]
    if dtype == "bfloat16":
        return _in_turn(everywhere, 1), reaching
    return (_in_turn(everywhere, 2)[::4], reaching[::2]) if dtype == "float16" else (everywhere, reaching)


def _in_turn(cases: list[Case], start: int) -> list[Case]:
    """Return each case with one reduction. The reductions alternate over the cases."""
    named: dict[str, list[Case]] = {}
    for case in cases:
        named.setdefault(case.name, []).append(case)
    return [same[(start + place) % len(same)] for place, same in enumerate(named.values())]


def check_all(works: Sequence[Work], tell: Callable[[str], None] = lambda text: None) -> Iterator[Line]:
    """Run the checks, and call `tell` with each case. If all of a backend passes, tell its harness at the end."""
    for work in works:
        lines = []
        for (function, dtype), judged in (_here if work.harness.processes == 1 else _in_processes)(work, tell):
            results = [comparison for comparisons, _ in judged for comparison in comparisons]
            worst = max(results or [_NOTHING], key=_nearness)
            failed = tuple(failure for _, failures in judged for failure in failures)
            lines.append(Line(work.backend.name, work.device, function, dtype, len(judged), worst, failed))
            yield lines[-1]
        if not any(line.failed for line in lines):
            work.harness.passed()


def _here(work: Work, tell: Callable[[str], None]) -> Iterator[tuple[tuple[str, str], list[Judged]]]:
    """Judge the cases of each function and dtype in this process, one after the other."""
    for kind, (everywhere, reaching) in work.cases.items():
        judged = [_judged(work, case, tell) for case in everywhere]
        with work.harness.watched() as seen:
            judged += [_judged(work, case, tell) for case in reaching]
        work.seen.update(seen)
        yield kind, judged


def _in_processes(work: Work, tell: Callable[[str], None]) -> Iterator[tuple[tuple[str, str], list[Judged]]]:
    """Judge the cases in several processes. Each compiles its own kernels."""
    pool = ProcessPoolExecutor(work.harness.processes, get_context("spawn"), _end_at_interrupt)
    try:
        parts = {
            kind: [_parts(pool, work, everywhere, False), _parts(pool, work, reaching, True)]
            for kind, (everywhere, reaching) in work.cases.items()
        }
        cases_of_parts = {part: cases for both in parts.values() for some in both for part, cases in some.items()}
        found: dict[Future[Any], list[Judged]] = {}
        for part in as_completed(cases_of_parts):
            cases = cases_of_parts[part]
            try:
                found[part], seen = part.result()
                work.seen.update(seen)
            except Exception as error:  # this includes a process that died
                found[part] = [([], [f"{case}: {type(error).__name__}: {error}"]) for case in cases]
            for case in cases:
                tell(f"{work}: {case}")
        for kind, both in parts.items():
            yield kind, [judged for some in both for part in some for judged in found[part]]
    finally:
        pool.shutdown(cancel_futures=True)


def _parts(
    pool: ProcessPoolExecutor, work: Work, cases: Sequence[AnyCase], watch: bool
) -> dict[Future[Any], Sequence[AnyCase]]:
    """Submit the cases to the processes, a few neighbouring cases at a time."""
    some = [cases[start : start + _CASES_OF_A_PROCESS] for start in range(0, len(cases), _CASES_OF_A_PROCESS)]
    return {pool.submit(_judge_part, work.backend.name, work.device, part, watch): part for part in some}


def _judge_part(name: str, device: str, cases: Sequence[AnyCase], watch: bool) -> tuple[list[Judged], set[str]]:
    """Judge cases in a worker process. Return the results, and the kernels that ran if `watch` is set."""
    work = _work_of(name, device)
    if not watch:
        return [_judged(work, case, lambda text: None) for case in cases], set()
    with work.harness.watched() as seen:
        judged = [_judged(work, case, lambda text: None) for case in cases]
    return judged, seen


@cache
def _work_of(name: str, device: str) -> Work:
    backend = (TABLE | ALSO)[name]()
    return Work(backend, device, backend.harness(device), {})


def _end_at_interrupt() -> None:
    """Let Ctrl-C, which the terminal sends to all processes, end this process silently."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _judged(work: Work, case: AnyCase, tell: Callable[[str], None]) -> Judged:
    """Return the comparisons of a case, and its failures.

    An exception counts as a failure, and so does a fallback warning.
    """
    tell(f"{work}: {case}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            if isinstance(case, DivergenceCase):
                comparisons = judge_divergence(work.backend, work.harness, case)
            else:
                comparisons = judge_case(work.backend, work.harness, case)
    except Exception as error:
        return [], [f"{case}: {type(error).__name__}: {error}"]
    return comparisons, [f"{case}: {result.output}" for result in comparisons if not result.passed]


def _nearness(result: Comparison) -> float:
    return result.error / result.bound if result.error >= 0 else float("inf")


def summary(works: Sequence[Work], lines: Sequence[Line]) -> str:
    """Return one sentence with the number of passed or failed cases and the kernels that ran."""
    count, failed = sum(line.cases for line in lines), sum(len(line.failed) for line in lines)
    result = f"all {count} cases passed" if not failed else f"{failed} of {count} cases failed"
    return f"{result[0].upper()}{result[1:]}; {'; '.join(_ran(work) for work in works)}."


def _ran(work: Work) -> str:
    if not work.seen:
        return f"which kernels ran as {work} is not known"
    left = [name for name in work.harness.kernels if not any(seen.startswith(name) for seen in work.seen)]
    not_reached = f" (not reached: {', '.join(left)})" if left else ""
    return f"{work} ran {', '.join(sorted(work.seen))}{not_reached}"


def table(rows: list[tuple[str, ...]]) -> str:
    """Return rows of cells as text in columns. The first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
