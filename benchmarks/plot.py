"""The pictures of results: panels of points or lines, one colour for each implementation.

Times are loop times, if these were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.records import Record
from benchmarks.report import where
from benchmarks.tables import kind

__all__ = ["save_plots"]

_COLORS = {"xent": "#1b7f5c", "transformers": "black", "Liger-Kernel": "C3", "Cut Cross Entropy": "C1"}
_MARKERS = "oDs^vXPph<>*d"
_NAMES = {"plain": "transformers", "Liger": "Liger-Kernel", "CCE": "Cut Cross Entropy"}
_MOST_COLUMNS = 3
_MIB = 2**20


@dataclass
class _Panel:
    """Points (x, y) by the label of their series; `style` of matplotlib, by label, if it is not a line with points."""

    title: str
    xlabel: str
    ylabel: str
    points: dict[str, list[tuple[Any, float]]] = field(default_factory=dict)
    style: dict[str, dict[str, Any]] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)

    def add(self, label: str, point: tuple[Any, float], **style: Any) -> None:
        """Add a point."""
        self.points.setdefault(label, []).append(point)
        self.style[label] = style


def save_plots(records: Sequence[Record], stem: Path) -> list[Path]:
    """Write `stem`-ranks.png and -training.png, those for which there are results."""
    measured = [record for record in records if record.seen is not None and record.status == "measured"]
    written = []
    for name, make in (("ranks", _ranks), ("training", _training)):
        if panels := make(measured):
            written.append(stem.with_name(f"{stem.name}-{name}.png"))
            _save(panels, "; ".join(dict.fromkeys(map(where, measured))), written[-1])
    return written


def _save(panels: Sequence[_Panel], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(len(panels), _MOST_COLUMNS)
    rows = ceil(len(panels) / columns)
    # Pages show pictures at 740 pixels: at this size text is 10 pixels high.
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(max(3.2 * columns, 7), 3.2 * rows + 1), squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    names = list(dict.fromkeys(label.partition(",")[0] for panel in panels for label in panel.points))
    for axes, panel in zip(grid.flat, panels, strict=False):
        for label, points in panel.points.items():
            name = label.partition(",")[0]
            look = {
                "color": _COLORS.get(name, f"C{names.index(name)}"),
                "marker": _MARKERS[names.index(name)],
                "markersize": 6,
                "clip_on": False,
                **panel.style[label],
            }
            handles[label] = axes.plot(*zip(*sorted(points), strict=True), label=label, **look)[0]
        axes.margins(0.1)
        axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, **panel.axes)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def _ranks(records: Sequence[Record]) -> list[_Panel]:
    """Return time and peak memory of the suite "sharded" against the number of GPUs."""
    panels = []
    sharded = sorted((record for record in records if record.case.function == "sharded"), key=lambda r: r.case.sizes)
    for sizes, group in groupby(sharded, key=lambda record: record.case.sizes):
        left = _Panel(f"{sizes}: time", "ranks", "ms in a loop, forward + backward", axes={"ylim": (0, None)})
        right = _Panel(f"{sizes}: memory", "ranks", "peak MiB above the inputs, a rank", axes={"ylim": (0, None)})
        for record in group:
            ranks = str(record.case.ranks)
            floor = {"color": "black", "linestyle": ":"} if kind(record) == "floor" else {}
            left.add(record.contender, (ranks, (record.seen or 0) * 1e3), **floor)
            if record.peak_bytes is not None:
                right.add(record.contender, (ranks, record.peak_bytes / _MIB), **floor)
        panels += [left, right]
    return panels


def _training(records: Sequence[Record]) -> list[_Panel]:
    """Return speed against peak memory of training steps, a panel for each model; open markers: no checkpointing."""
    panels: dict[str, _Panel] = {}
    for record in records:
        case = record.case
        if case.function == "training" and record.peak_bytes is not None:
            peak = record.peak_bytes / 2**30
            panel = _Panel(case.model or "", "peak memory, GiB", "thousand tokens per second", axes={"xlim": (0, None)})
            panel = panels.setdefault(panel.title, panel)
            label = _NAMES.get(record.contender, record.contender) + ", no checkpointing" * (not case.checkpointing)
            filled = {} if case.checkpointing else {"markerfacecolor": "none"}
            panel.add(label, (peak, case.tokens / (record.seen or 1) / 1e3), linestyle="", markersize=9, **filled)
            if case.checkpointing:
                found = {"plain": f"\n{peak:.1f} GiB", "xent": f", with xent {peak:.1f} GiB"}
                panel.title += found.get(record.contender, "")
    return list(panels.values())
