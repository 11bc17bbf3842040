"""The tables of results: one row per case, one column per contender, loop times first.

The terminal and documents get the same tables. In bold is the smallest number of a row, where xent and peers are in it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from benchmarks.contenders.entry import CONTENDERS
from benchmarks.records import Record

__all__ = ["Table", "kind", "make_tables"]


@dataclass(frozen=True)
class Table:
    """A caption, headings and rows of text. `ours` names the columns of xent."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    ours: frozenset[str] = frozenset()

    def markdown(self) -> str:
        """Return the caption and a Markdown table."""
        mark = self.ours and set(self.headings) - self.ours - {"case", "base"}
        lines = [self.headings, ("---",) * len(self.headings), *(_marked(row) if mark else row for row in self.rows)]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        return f"{self.caption}\n\n{table}" if self.caption else table


def _marked(row: tuple[str, ...]) -> tuple[str, ...]:
    """Return a row with its smallest numbers in bold."""
    numbers = {cell: float(cell.rstrip("x")) for cell in row if re.fullmatch(r"[\d.]+(e[+-]\d+)?x?", cell)}
    least = min(numbers.values(), default=None)
    return tuple(f"**{cell}**" if cell in numbers and numbers[cell] == least else cell for cell in row)


def kind(record: Record) -> str:
    """Return "ours", "peer" or "floor"; "peer" for one that is not in the table, as those of MLX."""
    known = CONTENDERS.get((record.case.function, record.contender))
    return known.kind if known else "peer"


def make_tables(records: Sequence[Record], only: Sequence[str] = ()) -> Iterator[Table]:
    """Yield the tables of one suite, one per quantity: times, memory and errors, as far as they were measured.

    `only` are the keys of quantities; those of others are left out.
    """
    if records[0].case.function == "training":
        yield _training_table(records)
        return
    what = "multiples of the base"
    cells = {"device": lambda r: _multiple(r, r.seconds, r.quantity("time"))}
    captions = {"device": f"Time, {what}"}
    if any(record.loop for record in records):
        cells = {"loop": lambda r: _multiple(r, r.loop or r.seconds, r.quantity("loop")), **cells}
        captions = {"loop": f"Loop time, {what}", "device": f"Device time, {what}"}
    for quantity, cell in {**cells, **_CELLS}.items():
        if any(map(cell, records)) and quantity in (only or (quantity,)):
            yield _table({**captions, **_CAPTIONS}[quantity], records, cell)


def _multiple(record: Record, seconds: Sequence[float], ratio: float | None) -> str:
    if not seconds:
        return ""
    if record.contender == record.base or not record.pairs:
        return f"{record.contender} {statistics.median(seconds) * 1e3:.3g} ms"
    return "" if ratio is None else f"{ratio:.2f}"


def _gradient_error(record: Record) -> str:
    if record.loss_error is None:
        return ""
    ratio = record.quantity("gradient errors")
    errors = [each for each in (record.input_gradient_error, record.weight_gradient_error) if each is not None]
    return f"{ratio:.2f}x" if ratio is not None else f"{max(errors):.1e}" if errors else ""


def _peak(record: Record) -> str:
    known = record.peak_bytes is not None and record.case.function != "logits"
    return f"{record.peak_bytes / 2**20:.0f}" if known else ""


_CAPTIONS = {
    "host": "Host time, microseconds per call",
    "memory": "Peak memory above the inputs, MiB",
    "loss": "Error of the loss, in nats; of a log-probability the largest",
    "gradients": "Largest relative error of a gradient; x: multiple of the unfused error",
}
_CELLS: dict[str, Callable[[Record], str]] = {
    "host": lambda r: "" if r.host is None else f"{r.host * 1e6:.0f}",
    "memory": _peak,
    "loss": lambda r: "" if r.loss_error is None else f"{r.loss_error:.1e}",
    "gradients": _gradient_error,
}


def _table(caption: str, records: Sequence[Record], cell: Callable[[Record], str]) -> Table:
    """Return a table without rows and columns whose cells are all empty. Of records in one cell the fastest counts."""
    grid: dict[str, dict[str, Record]] = {}
    for title, group in groupby(records, key=lambda record: record.case.title):
        row = grid.setdefault(title, {})
        for record in sorted(group, key=lambda record: record.seen or float("inf"), reverse=True):
            row[_column(record)] = record
    columns = [
        name
        for name in dict.fromkeys(map(_column, records))
        if any(cell(row[name]) for row in grid.values() if name in row)
    ]
    rows = [(title, *(cell(row[name]) if name in row else "" for name in columns)) for title, row in grid.items()]
    ours = frozenset(_column(record) for record in records if kind(record) == "ours") - {"base"}
    return Table(caption, ("case", *columns), tuple(row for row in rows if any(row[1:])), ours)


def _column(record: Record) -> str:
    """Return the column of a record. All bases share a column; so do quack's chunk sizes."""
    if record.contender == record.base:
        return "base"
    name = record.contender.replace(" fp32 logits", " fp32")
    return "quack" if re.fullmatch(r"quack \d+", name) else name


_TRAINING = ("model", "checkpointing", "variant", "ms per step", "tokens per second", "ratio to plain", "peak GiB")


def _training_table(records: Sequence[Record]) -> Table:
    """Return a table with one row per record. A ratio above 1 means more tokens per second than plain."""
    return Table(
        "",
        (*_TRAINING, "longest sequence"),
        tuple(_training_row(record) for record in records if record.status != "absent"),
    )


def _training_row(record: Record) -> tuple[str, ...]:
    case, seconds, longest = record.case, record.seen, ""
    name = (case.model, "on" if case.checkpointing else "off", record.contender)
    if record.longest is not None:
        longest = f"{'at least ' * record.at_least}{record.longest} in {case.limit:g} GiB"
    if seconds is None or record.status != "measured":
        return (*name, f"{record.status}: {record.reason[:160]}", "", "", "", longest)
    ratios = [base / own for base, own in record.loop_pairs or record.pairs] or [1.0]
    peak = "unknown" if record.peak_bytes is None else f"{record.peak_bytes / 2**30:.2f}"
    ratio = f"{statistics.median(ratios):.3f}"
    return (*name, f"{seconds * 1e3:.4g}", f"{case.tokens / seconds:.0f}", ratio, peak, longest)
