"""Case after case with a live bar of progress; every case is on disk as soon as it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.cases import Case
from benchmarks.records import Record

__all__ = ["Measure", "measure_all"]


class Measure(Protocol):
    """What measures one case: `progress` is told the name of each contender as its turn comes."""

    def __call__(self, case: Case, *, progress: Callable[[str], None]) -> list[Record]:
        """Return one record per contender of the case, the base first."""


def measure_all(cases: Sequence[Case], measure: Measure, lines: Path) -> list[Record]:
    """Measure all cases, write their records to `lines`, and return them."""
    records: list[Record] = []
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar, lines.open("w", encoding="utf-8") as file:
        task = bar.add_task("starting", total=sum(len(case.contenders) for case in cases))
        done = 0
        for case in cases:
            turn = [-1]

            def show(name: str, case: Case = case, done: int = done, turn: list[int] = turn) -> None:
                if name in case.contenders:
                    turn[0] = min(turn[0] + 1, len(case.contenders) - 1)
                bar.update(task, description=f"{case.title}: {name}", completed=done + max(turn[0], 0))

            found = measure(case, progress=show)
            records += found
            file.writelines(record.to_json() + "\n" for record in found)
            file.flush()
            done += len(case.contenders)
        bar.update(task, description="done", completed=done)
    return records
