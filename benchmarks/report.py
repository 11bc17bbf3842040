"""The terminal report of a suite: tables, goals, and which contenders did not run and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape

from benchmarks.records import Record
from benchmarks.tables import make_tables

__all__ = ["make_console", "print_report", "where"]

_BUSY_PERCENT = 5
_MOST_CHARACTERS = 300
_WIDTH_OF_FILES = 240


def make_console() -> Console:
    """Return a console that is wide enough for tables if its output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_OF_FILES)


def where(record: Record) -> str:
    """Return the machine and the version of the framework."""
    machine = record.machine
    versions = machine.get("versions", {})
    framework = next((f"{name} {versions[name]}" for name in ("torch", "mlx") if versions.get(name)), "")
    return f"{machine.get('gpu') or '{cpu}, {cores} cores'.format(**machine)}, {framework}"


def print_report(console: Console, suite: str, records: Sequence[Record]) -> None:
    """Print the report of one suite, with the most important part last."""
    console.print(f"[bold]{suite}[/bold]: {escape(where(records[0]))}", soft_wrap=True)
    tables = list(make_tables(records))
    clocks = 1 + any(record.loop for record in records)
    for table in (*tables[clocks:], *reversed(tables[:clocks])):
        console.print(Markdown(table.markdown()))
    for line in (*_remarks(records), *_disturbance(records[0].machine), *_goals(records)):
        console.print(line, soft_wrap=True)
    console.print()


def _goals(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        for name, quantity, most in record.case.goals:
            if name != record.contender or record.status != "measured":
                continue
            value, limit = record.quantity(quantity), f"{quantity} at most {most:g}"
            verdict = f"[yellow]unknown[/yellow]  {limit}"
            if value is not None:
                met = "[green]met    [/green]" if value <= most else "[red]missed [/red]"
                verdict = f"{met}  {limit}, measured {value:.4g}"
            yield f"{verdict}  {escape(record.case.title)}: {escape(name)}"


def _disturbance(machine: Mapping[str, Any]) -> Iterator[str]:
    if "gpu" not in machine and machine.get("busy", 0) > _BUSY_PERCENT:
        yield (
            f"[red]busy machine[/red]  other processes took {machine['busy']:.0f}% of all cores at the start: do not "
            "trust the ratios of time, they are biased against whoever synchronises its threads most"
        )


def _remarks(records: Sequence[Record]) -> Iterator[str]:
    """Yield the reasons why contenders did not run; equal reasons are shown once, with the number of cases."""
    reasons = Counter((r.status, r.contender, r.reason[:_MOST_CHARACTERS]) for r in records if r.reason)
    for (status, contender, reason), cases in reasons.items():
        yield f"[yellow]{status}[/yellow]  {escape(contender)} ({cases} cases): {escape(reason)}"
