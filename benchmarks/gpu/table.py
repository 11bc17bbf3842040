"""The table of a GPU's run: time against the floor of its case, memory above the inputs, errors against float32."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, zip_longest
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.contenders import find_contender
from benchmarks.records import Record

__all__ = ["CAPTION", "gpu_table"]

CAPTION = """\
time x: against the first row of the block, median over rounds (least..most). GB/s: one read of the logits and one write
over the time. peak: above the inputs, gradients included; beyond: without them; both in MiB.
errors against float32: absolute for the loss; relative for the gradients of the input (or logits) and the weight."""

_STYLES = {"floor": "dim", "ours": "bold", "peer": ""}


def gpu_table(suite: str, records: Sequence[Record], machine: dict[str, Any]) -> Table:
    """Make the table of one suite, a block for each case."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    table = Table(title=escape(f"{suite}: {machine.get('gpu', 'no GPU')}, {versions}"), title_justify="left")
    table.add_column("case", overflow="fold")
    table.add_column("contender", no_wrap=True)
    for heading in ("ms", "time x", "GB/s", "peak", "beyond", "loss error", "gradient errors"):
        table.add_column(heading, justify="right", overflow="fold")
    for title, group in groupby(records, key=lambda record: record.case.title):
        block = list(group)
        lines = title.split(", ") if len(block) > 1 else [title]
        for line, record in zip_longest(lines, block, fillvalue=None):
            if record is not None:
                style = _STYLES[find_contender(record.case.function, record.contender).kind]
                table.add_row(escape(line or ""), escape(record.contender), *_numbers(record), style=style)
        table.add_section()
    return table


def _numbers(record: Record) -> list[str]:
    if record.status != "measured":
        return [record.status]
    ratio = record.quantity("time")
    gradients = (record.input_gradient_error, record.weight_gradient_error)
    known = [f"{error:.2e}" for error in gradients if error is not None]
    beyond = record.beyond_gradients
    return [
        _format(record.milliseconds, ".3f"),
        "" if ratio is None else f"{ratio:.3f} ({min(record.ratios):.2f}..{max(record.ratios):.2f})",
        "" if record.bandwidth is None else f"{record.bandwidth / 1e9:.0f}",
        "" if record.peak_bytes is None else f"{record.peak_bytes / 2**20:.0f}",
        "" if beyond is None else f"{beyond / 2**20:.0f}",
        _format(record.loss_error, ".1e"),
        " ".join(known),
    ]


def _format(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)
