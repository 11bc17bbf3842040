"""The terminal report of a suite: tables, goals, and which contenders did not run and why."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from benchmarks.cases import Goal
from benchmarks.records import Record
from benchmarks.tables import kind, make_tables

__all__ = ["print_report"]

_DISTURBED = 0.05
_MOST_CHARACTERS = 300


def print_report(console: Console, suite: str, records: Sequence[Record]) -> None:
    """Print the report of one suite, with the most important part last."""
    machine = records[0].machine
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    console.print(f"[bold]{suite}[/bold]: {escape(where)}, {escape(versions)}", soft_wrap=True)
    tables = list(make_tables(records))
    clocks = 1 + any(record.loop for record in records)
    for table in (*tables[clocks:], *reversed(tables[:clocks])):
        console.print(table.rich())
    for line in (*_remarks(records), *_disturbance(records), *_goals(records)):
        console.print(line, soft_wrap=True)
    console.print()


def _goals(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        for goal in record.case.goals:
            if goal.contender == record.contender and record.status == "measured":
                where = f"{escape(record.case.title)}: {escape(record.contender)}{_best_peer(goal, record, records)}"
                yield f"{_verdict(goal, _value(goal, record, records))}  {where}"


def _value(goal: Goal, record: Record, records: Sequence[Record]) -> float | None:
    if goal.quantity != "host us a further chunk":
        return record.quantity(goal.quantity)
    chunks = int(re.sub(r"\D", "", record.contender))
    one = next((r.host for r in records if r.case == record.case and r.contender == "xent"), None)
    return None if one is None or record.host is None else (record.host - one) / (chunks - 1) * 1e6


def _best_peer(goal: Goal, record: Record, records: Sequence[Record]) -> str:
    """Return the best value of other projects in the same case."""
    rivals = [
        (value, other.contender)
        for other in records
        if other.case == record.case and kind(other) == "peer" and other.contender != other.base
        if (value := other.quantity(goal.quantity)) is not None
    ]
    return f" [dim](best peer {min(rivals)[0]:.4g}, {escape(min(rivals)[1])})[/dim]" if rivals else ""


def _verdict(goal: Goal, value: float | None) -> str:
    limit = f"{goal.quantity} at most {goal.at_most:g}"
    if value is None:
        return f"[yellow]unknown[/yellow]  {limit}"
    verdict = "[green]met    [/green]" if value <= goal.at_most else "[red]missed [/red]"
    return f"{verdict}  {limit}, measured {value:.4g}"


def _disturbance(records: Sequence[Record]) -> Iterator[str]:
    shares = [share for record in records for share in record.disturbance]
    if shares and (typical := statistics.median(shares)) > _DISTURBED:
        yield (
            f"[red]busy machine[/red]  other processes took {typical:.0%} of all cores while times were taken: "
            "do not trust the ratios of time, they are biased against whoever synchronises its threads most"
        )


def _remarks(records: Sequence[Record]) -> Iterator[str]:
    """Yield the reasons why contenders did not run; equal reasons are shown once, with the number of cases."""
    told = dict.fromkeys((record.contender, record.status, record.reason) for record in records if record.reason)
    for contender, status, reason in told:
        cases = [r.case.title for r in records if (r.contender, r.status, r.reason) == (contender, status, reason)]
        where = cases[0] if len(cases) == 1 else f"{len(cases)} cases"
        yield f"[yellow]{status}[/yellow]  {escape(contender)} ({escape(where)}): {escape(reason[:_MOST_CHARACTERS])}"
