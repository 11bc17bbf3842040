"""The plot of loop time per step and peak memory per rank against the number of GPUs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import Record
from benchmarks.tables import kind

__all__ = ["save_plot"]

_COLORS = {
    "products + all-reduce": "black",
    "overlapped": "#8c8c8c",
    "xent": "#1b7f5c",
    "xent sequence parallel": "#7cc4a4",
    "textbook": "#4f4f4f",
    "loss_parallel": "#d9a441",
    "Liger": "#c0504d",
    "Liger logits": "#e39a98",
}
_MIB = 2**20


def save_plot(records: Sequence[Record], path: Path) -> bool:
    """Write the plot; return whether there were results to show."""
    measured = [record for record in records if record.status == "measured" and record.loop]
    sizes = list(dict.fromkeys(_size(record) for record in measured))
    if not sizes:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(sizes), 2, figsize=(10, 3.8 * len(sizes) + 0.8), squeeze=False, layout="constrained"
    )
    for size, (left, right) in zip(sizes, axes, strict=True):
        mine = [record for record in measured if _size(record) == size]
        _draw(left, mine, lambda record: statistics.median(record.loop) * 1e3)
        _draw(right, mine, lambda record: None if record.peak_bytes is None else record.peak_bytes / _MIB)
        left.set(title=f"{size}: time", ylabel="ms in a loop, forward + backward", ylim=(0, None))
        right.set(title=f"{size}: memory", ylabel="peak MiB above the inputs, a rank", ylim=(0, None))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    machine = measured[-1].machine
    where = str(machine.get("gpu") or machine.get("cpu")).partition(" x ")
    figure.suptitle(f"{where[2] or where[0]}, torch {machine.get('versions', {}).get('torch')}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def _size(record: Record) -> str:
    case = record.case
    return f"{case.tokens}x{case.hidden}x{case.vocabulary} {case.dtype}"


def _draw(axes: Any, records: Sequence[Record], value: Callable[[Record], float | None]) -> None:
    for name in dict.fromkeys(record.contender for record in records):
        mine = sorted((record for record in records if record.contender == name), key=lambda record: record.case.ranks)
        points = [(record.case.ranks, value(record)) for record in mine]
        known = [(ranks, number) for ranks, number in points if number is not None]
        if known:
            line = ":" if kind(mine[0]) == "floor" else "-"
            axes.plot(*zip(*known, strict=True), line, marker="o", color=_COLORS.get(name, "#a05195"), label=name)
    axes.set_xticks(sorted({record.case.ranks for record in records}))
    axes.set_xlabel("GPUs" if records[0].case.device == "cuda" else "processes")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
