"""The cases, collected into suites: one table for each device, one file for each table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from benchmarks.cases import Case
from benchmarks.suites import cpu, cuda

__all__ = ["SUITES", "select_cases"]

SUITES: dict[str, dict[str, tuple[Case, ...]]] = {"cpu": cpu.SUITES, "cuda": cuda.SUITES}
"""The suites of a device by name, the one that is measured unless another is named first."""

_QUICK: dict[str, dict[str, tuple[Case, ...]]] = {"cpu": cpu.QUICK, "cuda": cuda.QUICK}


def select_cases(device: str, suites: Iterable[str], *, quick: bool, full: bool) -> list[Case]:
    """List the cases of the named suites: `quick` takes small sizes, `full` brings back whoever was left out."""
    table = (_QUICK if quick else SUITES)[device]
    cases = [case for suite in suites for case in table[suite]]
    if not full:
        return cases
    return [replace(case, contenders=case.contenders + case.left_out, left_out=()) for case in cases]
