"""Tables of a run: one row per case, one column per contender, loop times first.

The terminal and Markdown files get the same tables. In a document, `fill` writes them between two comments, so that no
number is typed by hand.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.markup import escape
from rich.table import Table as RichTable

from benchmarks.contenders import find_contender
from benchmarks.records import Record

__all__ = ["Table", "fill", "kind", "make_tables"]

_BLOCK = re.compile(r"(<!-- measured: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """A caption, headings and rows of text. `ours` names the columns of xent."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    ours: frozenset[str]

    def markdown(self) -> str:
        """Return the caption and a Markdown table; the smallest number of a row is bold if xent and peers are in it."""
        lines = [self.headings, ("---",) * len(self.headings)]
        peers = bool(set(self.headings) - self.ours - {"case", "base"})
        lines += [_marked(row) if peers else row for row in self.rows]
        return f"{self.caption}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def rich(self) -> RichTable:
        """Return a table for the terminal."""
        table = RichTable(title=escape(self.caption), title_justify="left", box=None, pad_edge=False)
        for number, heading in enumerate(self.headings):
            style = "bold" if heading in self.ours else ""
            table.add_column(escape(heading), justify="right" if number else "left", no_wrap=True, style=style)
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table


def _marked(row: tuple[str, ...]) -> tuple[str, ...]:
    """Return a row with its smallest numbers in bold."""
    numbers = {cell: float(cell.rstrip("x")) for cell in row if re.fullmatch(r"[\d.]+(e-?\d+)?x?", cell)}
    least = min(numbers.values(), default=None)
    return tuple(f"**{cell}**" if cell in numbers and numbers[cell] == least else cell for cell in row)


def kind(record: Record) -> str:
    """Return "ours", "peer" or "floor"; "peer" for a contender that is no longer in the table."""
    try:
        return find_contender(record.case.function, record.contender).kind
    except KeyError:
        return "peer"


def make_tables(records: Sequence[Record]) -> Iterator[Table]:
    """Yield the tables of one suite, one per quantity: times, memory and errors, as far as they were measured."""
    what = "base in ms, the others as multiples of it; forward and backward pass unless said"
    if any(record.loop for record in records):
        yield _table(f"Loop time: {what}", records, _loop)
        yield _table(f"Device time: {what}", records, _time)
    else:
        yield _table(f"Time: {what}", records, _time)
    if any(record.host is not None for record in records):
        yield _table("Host time, microseconds per call", records, _host)
    if any(_peak(record) for record in records):
        yield _table("Peak memory above the inputs, MiB", records, _peak)
    if any(record.loss_error is not None for record in records):
        yield _table("Error of the loss, in nats; of a log-probability the largest", records, _loss_error)
    if any(_gradient_error(record) for record in records):
        yield _table("Largest relative error of a gradient; x: multiple of the unfused error", records, _gradient_error)


def _loop(record: Record) -> str:
    return _multiple(record, record.loop, record.quantity("loop"))


def _time(record: Record) -> str:
    return _multiple(record, record.seconds, record.quantity("time"))


def _multiple(record: Record, seconds: Sequence[float], ratio: float | None) -> str:
    if not seconds:
        return ""
    if record.contender == record.base or not record.pairs:
        return f"{record.contender} {statistics.median(seconds) * 1e3:.3g} ms"
    return "" if ratio is None else f"{ratio:.2f}"


def _host(record: Record) -> str:
    return "" if record.host is None else f"{record.host * 1e6:.0f}"


def _peak(record: Record) -> str:
    known = record.peak_bytes is not None and record.case.function != "logits"
    return f"{record.peak_bytes / 2**20:.0f}" if known else ""


def _loss_error(record: Record) -> str:
    return "" if record.loss_error is None else f"{record.loss_error:.1e}"


def _gradient_error(record: Record) -> str:
    if record.loss_error is None:
        return ""
    ratio = record.quantity("gradient errors")
    errors = [each for each in (record.input_gradient_error, record.weight_gradient_error) if each is not None]
    return f"{ratio:.2f}x" if ratio is not None else f"{max(errors):.1e}" if errors else ""


def _table(caption: str, records: Sequence[Record], cell: Callable[[Record], str]) -> Table:
    """Return a table without rows and columns whose cells are all empty."""
    grid: dict[str, dict[str, Record]] = {}
    for title, group in groupby(records, key=lambda record: record.case.title):
        row = grid.setdefault(title, {})
        for record in group:
            known = row.get(_column(record))
            if known is None or (record.seen or float("inf")) < (known.seen or float("inf")):
                row[_column(record)] = record
    columns = [name for name in dict.fromkeys(_column(r) for r in records) if any(cell(r) for r in _named(grid, name))]
    ours = {_column(record) for record in records if kind(record) == "ours"} - {"base"}
    return Table(
        caption,
        ("case", *columns),
        tuple(
            (title, *(cell(row[name]) if name in row else "" for name in columns))
            for title, row in grid.items()
            if any(cell(record) for record in row.values())
        ),
        frozenset(ours),
    )


def _named(grid: dict[str, dict[str, Record]], name: str) -> list[Record]:
    return [row[name] for row in grid.values() if name in row]


def _column(record: Record) -> str:
    """Return the column of a record. All bases share a column; so do quack's chunk sizes, of which the best counts."""
    if record.contender == record.base:
        return "base"
    name = record.contender.replace(" fp32 logits", " fp32")
    return "quack" if re.fullmatch(r"quack \d+", name) else name


def fill(document: Path, suites: dict[str, list[Record]]) -> list[str]:
    """Write the tables of suites between `<!-- measured: SUITE -->` and `<!-- end -->`; return the suites found."""
    found: list[str] = []

    def tables(match: re.Match[str]) -> str:
        if match["name"] not in suites:
            return match[0]
        found.append(match["name"])
        return match[1] + "\n" + "\n".join(each.markdown() for each in make_tables(suites[found[-1]])) + "\n" + match[3]

    document.write_text(_BLOCK.sub(tables, document.read_text(encoding="utf-8")), encoding="utf-8")
    return found
