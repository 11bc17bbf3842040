"""Measure a list of cases with a progress bar, and write each case to disk when it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.cases import Case
from benchmarks.records import Record, write_records

__all__ = ["Measure", "OutOfTime", "measure_all"]


class OutOfTime(Exception):
    """The time limit of the run is reached. The remaining cases are left for another run."""


class Measure(Protocol):
    """A function that measures one case; it calls `progress` with the name of each contender at its turn."""

    def __call__(self, case: Case, *, progress: Callable[[str], None]) -> list[Record]:
        """Return one record per contender of the case, the base first; or raise OutOfTime."""


def measure_all(
    cases: Sequence[Case], measure: Measure, lines: Path, known: Sequence[Record] = ()
) -> tuple[list[Record], list[Case]]:
    """Measure all cases that have no known record, and write all records to `lines`; return them and the cases left."""
    records = list(known)
    left = [case for case in cases if all(record.case != case for record in records)]
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=len(left))
        while left:
            case = left[0]
            try:
                records += measure(
                    case, progress=lambda name, case=case: bar.update(task, description=f"{case.title}: {name}")
                )
            except OutOfTime:
                break
            lines.write_text("".join(write_records(records)), encoding="utf-8")
            del left[0]
            bar.advance(task)
        bar.update(task, description="done" if not left else f"out of time, {len(left)} left")
    return records, left
