"""`python -m xent check`: run the gradient checks of this machine's backends on its own hardware, and report them.

Its cases are the smallest set that reaches every kernel and loop; `--full` adds pairs of options.
"""

import random
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain, combinations, islice, product
from multiprocessing import get_context
from typing import Any, NamedTuple

from xent.backends import TABLE, backends
from xent.backends.protocol import Backend
from xent.command.check.case import LOSSES, Case, Named
from xent.command.check.harness import Harness, Operand
from xent.command.check.harnesses import harness_of
from xent.command.check.judge import Comparison, judge_case
from xent.core.spec import DIFFERENTIABLE

__all__ = [
    "FUNCTIONS",
    "Line",
    "Work",
    "cases_of",
    "check",
    "check_all",
    "chunk_cases",
    "covering",
    "pairs",
    "planned",
    "reaching",
    "summary",
]

_NEIGHBOURS = 8  # cases that follow each other in a process, because they use the same compiled kernels
_MOST_FAILURES = 20
_ROW = "{:8} {:8} {:21} {:9} {:>5} {:>12} {:>9}  {}".format
Kind = tuple[str, str]
"""(function, dtype)"""


class Line(NamedTuple):
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
    harness: Harness[Operand]
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

    def only(self, name: str) -> "Work":
        """Return this work with the case of that name alone, or without any."""
        matching = [case for cases in self.cases.values() for case in cases if str(case) == name]
        return replace(self, full=False, cases={(case.function, case.dtype): [case] for case in matching})


def check(names: Sequence[str] = (), full: bool = False, case: str | None = None) -> int:
    """Check the named backends, or all that are available; print a table; return the exit status.

    If `full`, every pair of options is checked, and not only every kernel and loop. `case` names the only one to check.
    """
    reasons = {info.name: info.reason for info in sorted(backends(), key=lambda info: info.available)}
    reasons["numpy"] = "the reference is what the others are held to"
    for name in names:
        reason = reasons.get(name, "there is no such backend")
        if reason is not None:
            print(f"{name} cannot be checked: {reason}", file=sys.stderr)
            return 2
    works = planned(names, full or case is not None)
    if not works:
        print("No backend to check: neither PyTorch nor MLX is installed.", file=sys.stderr)
        return 1
    if case is not None:
        works = list(filter(len, [work.only(case) for work in works]))
        if not works:
            print(f"there is no case {case!r}", file=sys.stderr)
            return 2
    seconds = sum(len(work) * work.harness.seconds / work.harness.processes for work in works) + 1
    print(f"{sum(map(len, works))} cases for {', '.join(map(str, works))}: about {seconds:.0f} s.")
    print(_ROW("backend", "device", "function", "dtype", "cases", "worst error", "allowed", "result"), flush=True)
    lines = []
    for line in check_all(works):
        *named, worst, failures = line
        result = f"{len(failures)} failed" if failures else "passed"
        print(_ROW(*named, f"{worst.error:.1e}", f"{worst.bound:.1e}", result), flush=True)
        lines.append(line)
    failed = [failure for line in lines for failure in line.failed]
    for failure in failed[:_MOST_FAILURES]:
        print(f"FAILED {failure}")
    for note in sorted(set().union(*(work.notes for work in works))):
        print(f"Note: {note}")
    print(summary(works, lines))
    return 1 if failed else 0


def planned(names: Sequence[str] = (), full: bool = False) -> list[Work]:
    """Return the checks of the named backends, or without names of all available ones except the reference."""
    works = []
    for (name, _), load in TABLE.items():
        if name == "numpy" or (names and name not in names) or not (backend := load()).info().available:
            continue
        for device in backend.info().devices:
            harness = harness_of(backend, device)
            kinds = [(function, dtype) for function in FUNCTIONS for dtype in harness.dtypes]
            works.append(Work(backend, device, harness, {kind: cases_of(harness, *kind, full) for kind in kinds}, full))
    return works


def cases_of(harness: Harness[Operand], function: str, dtype: str, full: bool = False) -> Sequence[Case]:
    """Return the cases that reach every kernel and loop of this device; if `full`, every pair of options as well."""
    return reaching(harness, function, dtype) + (pairs(function, dtype) if full else [])


def check_all(works: Sequence[Work]) -> Iterator[Line]:
    """Run the checks. If a full check of a backend passes, tell its harness."""
    for work in works:
        good, results = True, _results(work)
        for (function, dtype), cases in work.cases.items():
            comparisons, failed, seen, notes = (
                list(chain.from_iterable(parts)) for parts in zip(*islice(results, len(cases)), strict=True)
            )
            work.seen.update(seen)
            work.notes.update(notes)
            good = good and not failed
            worst = max(comparisons, key=_nearness, default=Comparison("", 0.0, 1.0))
            yield Line(work.backend.name, work.device, function, dtype, len(cases), worst, tuple(failed))
        if good and work.full and not work.notes:
            work.harness.passed()


_Result = tuple[list[Comparison], list[str], set[str], set[str]]
"""Of a case: comparisons, descriptions of failures, kernels that ran, and warnings."""


def _results(work: Work) -> Iterator[_Result]:
    """Judge the cases, in this process or in several, each of which compiles its own kernels. Yield in their order.

    If a process ends, because of a crash or for want of memory, a case has failed: the one that also ends a process
    of its own. The cases after it are judged in new processes.
    """
    cases, processes = list(chain.from_iterable(work.cases.values())), work.harness.processes
    if processes == 1:
        yield from (_judged(work.backend, work.harness, case) for case in cases)
        return
    key = work.backend.name, work.backend.framework
    judge = partial(_judged_by, key, work.device)

    def judged(cases: Sequence[Case], processes: int) -> Iterator[_Result]:
        """Yield results until a process ends."""
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool, suppress(BrokenProcessPool):
            yield from pool.map(judge, cases, chunksize=_NEIGHBOURS)

    done = 0
    while done < len(cases):
        for result in judged(cases[done:], processes):
            yield result
            done += 1
        if done < len(cases):
            command = f"python -m xent check {work.backend.name} --case {shlex.quote(str(cases[done]))}"
            failure = f"{cases[done]}: the process ended; to run it alone: {command}"
            yield next(judged(cases[done : done + 1], 1), ([], [failure], set(), set()))
            done += 1


def _judged_by(key: tuple[str, str], device: str, case: Case) -> _Result:
    """Judge a case in a worker process."""
    backend = TABLE[key]()
    return _judged(backend, harness_of(backend, device), case)


def _judged(backend: Backend, harness: Harness[Operand], case: Case) -> _Result:
    """Judge a case. An exception is a failure; a warning, which says that other code ran, is a note."""
    with harness.watched() as seen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            comparisons = judge_case(backend, harness, case)
            failed = [f"{case}: {result.output}" for result in comparisons if not result.passed]
        except Exception as error:
            comparisons, failed = [], [f"{case}: {type(error).__name__}: {error}"]
    return comparisons, failed, seen, {str(warning.message) for warning in caught if "xent" in str(warning.message)}


def _nearness(result: Comparison) -> float:
    return result.error / result.bound if result.error >= 0 else float("inf")


def summary(works: Sequence[Work], lines: Sequence[Line]) -> str:
    """Return one sentence with the number of passed or failed cases and the kernels that ran."""
    count, failed = sum(line.cases for line in lines), sum(len(line.failed) for line in lines)
    result = f"All {count} cases passed" if not failed else f"{failed} of {count} cases failed"
    for work in works:
        left = [name for name in work.harness.kernels if not any(seen.startswith(name) for seen in work.seen)]
        result += f"; {work} ran {', '.join(sorted(work.seen)) or 'unknown kernels'}"
        result += f" (not reached: {', '.join(left)})" if left and work.seen else ""
    return f"{result}."


FUNCTIONS = (*LOSSES, "log_probs", "linear_log_probs", "divergence", "linear_divergence")

Setting = Named
"""Options, and fields of a case, that belong together."""
_BENDS: dict[str, Sequence[Any]] = {"softcap": (3.0,), "logit_scale": (1.5, -0.7)}
"""Factors, each with values for the option or field of its name, or with settings. A case may also have none."""
_OF_LINEAR = {"bias": (True,), "shift": (2,), "workspace": (67 * 8 * 5,)}
_OF_LOSSES = _BENDS | {
    "reduction": (
        {"normalizer": 13.5},
        {"normalizer": "array"},
        "sum",
        "none",
        {"reduction": "none", "stats": DIFFERENTIABLE},
    ),
    "target": ({"ignore_index": 2}, {"probabilities": True}, {"probabilities": True, "trained": True}),
    "weight": (True,),
    "label_smoothing": (0.1, 1.0),
    "z_loss": (0.02,),
    "sample_weight": (True,),
}
_OF_LOG_PROBS = _BENDS | {
    "entropy": (
        True,
        {"entropy": True, "missing": ("log_probs",)},
        {"entropy": True, "stats": ("lse",), "missing": ("entropy",)},
    ),
    "temperature": (0.7, "rows"),
    "ignore_index": (2,),
    "support": (True,),
}
_OF_DIVERGENCES = _BENDS | {
    "teacher": (
        {"beta": 0.5},
        {"beta": 1.0},
        {"teacher": "linear", "beta": 0.1, "teacher_softcap": 4.0},
        {"kind": "tv"},
        "bucket",
        {"teacher": "bucket", "kind": "tv"},
        "renormalize",
        "drop",
    ),
    "reduction": ({"normalizer": 13.5}, "sum", "none"),
    "temperature": (2.5,),
    "sample_weight": (True,),
    "stats": ({"stats": ("entropy",), "missing": ("entropy",)},),
}
_EVERY = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 5.0, "logit_scale": 0.8, "sample_weight": True}
_OF_ROWS: Setting = {"temperature": "rows", "softcap": 5.0, "logit_scale": 0.8, "entropy": True, "stats": ("lse",)}
_SETTINGS: dict[str, Sequence[Setting]] = {
    "cross_entropy": (
        {},
        {"reduction": "none"},
        _EVERY | {"weight": True, "ignored": 0.3},
        _EVERY | {"probabilities": True, "ignored": 0.3},
    ),
    "linear_cross_entropy": ({}, {"reduction": "none"}),
    "log_probs": (_OF_ROWS | {"support": True},),
    "linear_log_probs": (_OF_ROWS,),
}
"""The settings that reach every kernel and loop of a number of classes."""
_FIELDS = {attribute.name for attribute in fields(Case)}


def reaching(harness: Harness[Operand], function: str, dtype: str) -> list[Case]:
    """Return the smallest set of cases that reaches every kernel and loop of the device.

    One dtype, bfloat16, gets every size that the harness names; the others a short row.
    """
    sizes = {"short": 67} | (harness.sizes(dtype) if dtype == "bfloat16" else {})
    is_linear, is_all = function.startswith("linear_"), len(sizes) > 1
    if function.endswith("divergence"):
        short = Case(function, (3, 7), 67, dtype, "short", reduction="none")
        chunks = replace(short, name="chunks", workspace=67 * 8 * 5, reduction="mean")
        long = replace(short, name="long", rows=(3,), vocabulary=3001, classes=64, reduction="mean")
        cases = [short, *([chunks if is_linear else long] if is_all else [])]
        return [_set(case, (setting,)) for case in cases for setting in _settings(_OF_DIVERGENCES)["teacher"]]
    reduction = "mean" if function in LOSSES else "none"
    cases = [
        Case(function, (5,), size, dtype, name, reduction=reduction, hidden=16, ignored=0.0, alone=True)
        for name, size in sizes.items()
    ]
    variants = [_set(case, (setting,)) for case in cases for setting in _SETTINGS[function]]
    if function == "linear_log_probs":  # in a longer row the gradient of a class in one row's support would cancel
        variants.append(_set(cases[0], (_OF_ROWS, {"support": True})))
    return variants + (chunk_cases(function, dtype) if is_linear and is_all else [])


def chunk_cases(function: str, dtype: str) -> list[Case]:
    """Return cases of a linear function in one chunk, in four (the last one smaller), and in more than 16.

    The gradient of a classifier is accumulated in another way over more than 16 chunks.
    """
    single = Case(function, (24,), 1000, dtype, "one chunk", hidden=32, ignored=0.2, alone=True)
    if function not in LOSSES:
        single = replace(single, reduction="none", entropy=True)
    row = single.vocabulary * {"float64": 8, "float32": 4}.get(dtype, 2)
    several = replace(single, name="several chunks", workspace=7 * row, bias=True)
    more = [replace(several, reduction="none"), replace(single, name="many chunks", workspace=row)]
    return [single, several, *(more if function in LOSSES else [])]


def pairs(function: str, dtype: str) -> list[Case]:
    """Return cases that have every pair of two settings of options, results and gradients."""
    factors = _OF_LOSSES if function in LOSSES else _OF_DIVERGENCES if "divergence" in function else _OF_LOG_PROBS
    if function.startswith("linear_"):
        factors = factors | _OF_LINEAR
    reduction = "none" if function.endswith("log_probs") else "mean"
    base = Case(function, (4, 12), 67, dtype, "", reduction=reduction)
    return [_set(base, row) for row in covering(_settings(factors), function + dtype)]


def _settings(factors: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Setting]]:
    """Return the settings of each factor, and none."""
    return {
        name: [{}, *(value if isinstance(value, dict) else {name: value} for value in levels)]
        for name, levels in factors.items()
    }


def _set(case: Case, settings: Sequence[Setting]) -> Case:
    """Return a case with some settings, which also name it."""
    merged = {name: value for setting in settings for name, value in setting.items()}
    shown = [f"{name}={value}" for name, value in merged.items() if name not in ("reduction", "teacher")]
    options = {name: value for name, value in merged.items() if name not in _FIELDS}
    own = {name: value for name, value in merged.items() if name in _FIELDS}
    return replace(case, name=", ".join(filter(None, [case.name, *shown])) or "plain", options=options, **own)


def covering(factors: Mapping[str, Sequence[Setting]], seed: str) -> list[tuple[Setting, ...]]:
    """Return rows, each with one setting of every factor, in which every pair of settings of two factors occurs.

    Of some random rows, those are kept that have the most pairs which are still missing.
    """
    generator = random.Random(seed)
    named = [[(name, place) for place in range(len(settings))] for name, settings in factors.items()]
    missing = {pair for first, other in combinations(named, 2) for pair in product(first, other)}
    rows = []
    while missing:
        drawn = [[generator.choice(settings) for settings in named] for _ in range(100)]
        best = max(drawn, key=lambda row: len(missing.intersection(combinations(row, 2))))
        missing.difference_update(combinations(best, 2))
        rows.append(tuple(factors[name][place] for name, place in best))
    return rows
