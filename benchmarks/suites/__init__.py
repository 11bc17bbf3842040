"""The suites of cases: one table per device, one file per table."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.cases import Case
from benchmarks.suites import cpu, cuda

__all__ = ["SUITES", "select_cases"]

SUITES: dict[str, dict[str, tuple[Case, ...]]] = {
    "cpu": {**cpu.SUITES, "host": cuda.HOST_ON_CPU},
    "cuda": cuda.SUITES,
}
"""Device -> its suites by name. The first is the default."""

_QUICK: dict[str, dict[str, tuple[Case, ...]]] = {"cpu": {**cpu.QUICK, "host": cuda.HOST_ON_CPU}, "cuda": cuda.QUICK}


def select_cases(device: str, suites: Iterable[str], *, quick: bool = False) -> list[Case]:
    """List the cases of the named suites; `quick` takes small sizes."""
    table = (_QUICK if quick else SUITES)[device]
    return [case for suite in suites for case in table[suite]]
