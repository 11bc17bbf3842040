"""What the terminal shows: a table per suite, then the goals it was measured against, then who did not run and why."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.cases import Goal
from benchmarks.contenders import find_contender
from benchmarks.gpu.table import CAPTION as GPU_CAPTION
from benchmarks.gpu.table import gpu_table
from benchmarks.records import Record

__all__ = ["print_report"]

_DISTURBED = 0.05

_CAPTION = """\
time x and memory x: against the first row of the block; time x is the median over pairs (least..most).
peak: resident memory above the start of the call; gradients: their share of it; beyond: the rest. All in MiB."""
_ERRORS_CAPTION = """
errors against float64: absolute for the loss; relative for the gradients of input and weight."""


def print_report(console: Console, suite: str, records: Sequence[Record], machine: dict[str, Any]) -> None:
    """Print everything about one suite; each contender is named, whether it ran or not."""
    with_errors = any(record.case.accuracy for record in records)
    if records[0].case.device == "cpu":
        console.print(_table(suite, records, machine, with_errors), _CAPTION + _ERRORS_CAPTION * with_errors, sep="\n")
    else:
        console.print(gpu_table(suite, records, machine), GPU_CAPTION, sep="\n")
    for line in (*_goals(records), *_remarks(records), *_disturbance(records)):
        console.print(line, soft_wrap=True)
    console.print()


def _table(suite: str, records: Sequence[Record], machine: dict[str, Any], with_errors: bool) -> Table:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    title = f"{suite}: {machine['cpu']}, {machine['cores']} cores, {versions}"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("case", overflow="fold")
    table.add_column("contender", overflow="fold")
    numbers = ["ms", "time x", "peak", "gradients", "beyond", "memory x"]
    for heading in numbers + ["loss error", "gradient errors"] * with_errors:
        table.add_column(heading, justify="right", overflow="fold")
    for title, group in groupby(records, key=lambda record: record.case.title):
        block = list(group)
        lines = title.split(", ", maxsplit=1) if len(block) > 1 else [title]
        for line, record in zip_longest(lines, block, fillvalue=None):
            if record is not None:
                table.add_row(escape(line or ""), escape(record.contender), *_numbers(record, with_errors))
        table.add_section()
    return table


def _numbers(record: Record, with_errors: bool) -> list[str]:
    if record.status != "measured":
        return [record.status]
    ratio = record.quantity("time")
    cells = [
        _format(record.milliseconds, ".1f"),
        "" if ratio is None else f"{ratio:.2f} ({min(record.ratios):.2f}..{max(record.ratios):.2f})",
        _mebibytes(record.peak_bytes),
        _mebibytes(record.gradient_bytes),
        _mebibytes(record.beyond_gradients),
        _format(record.quantity("memory"), ".3f"),
    ]
    if with_errors:
        gradients = (record.input_gradient_error, record.weight_gradient_error)
        cells += [_format(record.loss_error, ".1e"), " ".join(_format(error, ".1e") for error in gradients)]
    return cells


def _format(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def _mebibytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**20:.1f}"


def _goals(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        for goal in record.case.goals:
            if goal.contender == record.contender and record.status == "measured":
                where = f"{escape(record.case.title)}: {escape(record.contender)}{_best_peer(goal, record, records)}"
                yield f"{_verdict(goal, record)}  {where}"


def _best_peer(goal: Goal, record: Record, records: Sequence[Record]) -> str:
    """Name the least that another project needs in the same case, if its ratios are to a floor."""
    if find_contender(record.case.function, record.base).kind != "floor":
        return ""
    rivals = [
        (value, other.contender)
        for other in records
        if other.case == record.case and find_contender(other.case.function, other.contender).kind == "peer"
        if (value := other.quantity(goal.quantity)) is not None
    ]
    return f" [dim](best peer {min(rivals)[0]:.4g}, {escape(min(rivals)[1])})[/dim]" if rivals else ""


def _verdict(goal: Goal, record: Record) -> str:
    value = record.quantity(goal.quantity)
    limit = f"{goal.quantity} at most {goal.at_most:g}"
    if value is None:
        return f"[yellow]unknown[/yellow]  {limit}"
    verdict = "[green]met    [/green]" if value <= goal.at_most else "[red]missed [/red]"
    return f"{verdict}  {limit}, measured {value:.6g}"


def _disturbance(records: Sequence[Record]) -> Iterator[str]:
    shares = [share for record in records for share in record.disturbance]
    if shares and (typical := statistics.median(shares)) > _DISTURBED:
        yield (
            f"[red]busy machine[/red]  other processes took {typical:.0%} of all cores while times were taken: "
            "do not trust the ratios of time, they are biased against whoever synchronises its threads most"
        )


def _remarks(records: Sequence[Record]) -> Iterator[str]:
    """Equal reasons of one contender are told once, with the number of cases."""
    told = dict.fromkeys((record.contender, record.status, record.reason) for record in records if record.reason)
    for contender, status, reason in told:
        cases = [r.case.title for r in records if (r.contender, r.status, r.reason) == (contender, status, reason)]
        where = cases[0] if len(cases) == 1 else f"{len(cases)} cases"
        yield f"[yellow]{status}[/yellow]  {escape(contender)} ({escape(where)}): {escape(reason)}"
