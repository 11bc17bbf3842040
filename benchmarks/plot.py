"""The pictures of results: panels of points or lines, one colour for each implementation.

Times are loop times, if these were measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.records import Record
from benchmarks.report import where
from benchmarks.tables import kind

__all__ = ["save_plots", "save_training_plot"]

_COLORS = {
    "torch": "#8c8c8c",
    "torch fp32 logits": "#4f4f4f",
    "torch.compile": "#d9a441",
    "torch.compile fp32 logits": "#d98f1f",
    "torch chunked": "#5b8db8",
    "Liger": "#c0504d",
    "Liger in place": "#c0504d",
    "Liger logits": "#e39a98",
    "CCE": "#7d5ba6",
    "quack": "#2f6db5",
    "quack in place": "#86b0dd",
    "textbook": "#4f4f4f",
    "loss_parallel": "#d9a441",
    "plain": "black",
    "xent": "#1b7f5c",
    "xent portable": "#53a386",
    "xent inplace": "#7cc4a4",
    "xent sequence parallel": "#7cc4a4",
}
_TRAINING = {"plain": "transformers alone", "Liger": "Liger-Kernel's head", "CCE": "Cut Cross Entropy"}
_MOST_COLUMNS = 3
_FEWEST_SIZES = 3
_MIB, _GIB = 2**20, 2**30


@dataclass
class _Panel:
    """Points (x, y) by the label of their series; `style` of matplotlib, by label, if it is not a line with points."""

    title: str
    xlabel: str
    ylabel: str
    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    style: dict[str, dict[str, Any]] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)
    ticks: Mapping[float, str] = field(default_factory=dict)

    def add(self, label: str, point: tuple[float, float], **style: Any) -> None:
        """Add a point."""
        self.points.setdefault(label, []).append(point)
        self.style[label] = {"color": _color(label), **style}


def save_plots(records: Sequence[Record], stem: Path) -> list[Path]:
    """Write `stem`-frontier.png, -bandwidth.png and -ranks.png, those for which there are results."""
    measured = [record for record in records if record.seen is not None and record.status == "measured"]
    written = []
    for name, make in (("frontier", _frontiers), ("bandwidth", _bandwidth), ("ranks", _ranks)):
        if panels := make(measured):
            written.append(stem.with_name(f"{stem.name}-{name}.png"))
            _save(panels, where(measured[0]), written[-1])
    return written


def save_training_plot(results: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write speed against peak memory of training steps, a panel for each model; open markers: no checkpointing."""
    measured = [result for result in results if result["status"] == "measured" and result["peak"] is not None]
    panels = []
    for model, group in groupby(sorted(measured, key=lambda result: str(result["model"])), lambda r: r["model"]):
        mine = list(group)
        panel = _Panel(f"{model}, {mine[0]['tokens']} tokens", "peak memory, GiB", "thousand tokens per second")
        panel.axes = {"xlim": (0, None)}
        for result in mine:
            name, on = result["variant"], result["checkpointing"]
            label = _TRAINING.get(name, name) + ("" if on else ", no checkpointing")
            speed = result["tokens"] / statistics.median(result["rounds"]) / 1e3
            look = {"linestyle": "", "markersize": 9, "color": _color(name)} | (
                {} if on else {"markerfacecolor": "none"}
            )
            panel.add(label, (result["peak"] / _GIB, speed), **look)
        panels.append(panel)
    _save(panels, title, path)


def _save(panels: Sequence[_Panel], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(len(panels), _MOST_COLUMNS)
    rows = ceil(len(panels) / columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(max(5.0 * columns, 8), 4.2 * rows + 1), squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, panels, strict=False):
        for label, points in panel.points.items():
            look = {"marker": "o", "markersize": 6, **panel.style[label]}
            handles[label] = axes.plot(*zip(*sorted(points), strict=True), label=label, **look)[0]
        axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, **panel.axes)
        if panel.ticks:
            axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axes.margins(0.1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _color(name: str) -> str:
    family = {"quack": "#2f6db5", "xent": "#a6d9c2"}.get(name.partition(" ")[0], "#a05195")
    return _COLORS.get(name, family)


def _frontiers(records: Sequence[Record]) -> list[_Panel]:
    """Return time against peak memory for the linear cases; a floor, which needs no memory, is a line."""
    panels = []
    linear = [record for record in records if record.case.is_linear and record.case.suite not in ("host", "sharded")]
    for case, group in groupby(linear, key=lambda record: record.case):
        panel = _Panel(case.title.replace(", ", "\n"), "peak MiB above the inputs", "ms, forward + backward")
        panel.axes = {"xscale": "log", "yscale": "log"}
        mine = list(group)
        peaks = [record.peak_bytes for record in mine if record.peak_bytes]
        for record in mine if peaks else ():
            time = (record.seen or 0) * 1e3
            if record.peak_bytes is None:
                for edge in (min(peaks), max(peaks)):
                    panel.add("products alone", (edge / _MIB, time), color="black", linestyle=":", marker="")
            else:
                marker = "D" if kind(record) == "ours" else "o"
                panel.add(record.contender, (max(record.peak_bytes, 1) / _MIB, time), linestyle="", marker=marker)
        panels.append(panel)
    return [panel for panel in panels if panel.points]


def _bandwidth(records: Sequence[Record]) -> list[_Panel]:
    """Return the bandwidth over the vocabularies of the suite "logits": one read and one write, divided by the time."""
    sweep = [record for record in records if record.case.suite == "logits"]
    tokens = min((record.case.tokens for record in sweep), default=0)
    sweep = [record for record in sweep if record.case.tokens == tokens]
    sizes = sorted({record.case.vocabulary for record in sweep})
    if len(sizes) < _FEWEST_SIZES:
        return []
    ylabel = "GB/s: one read and one write of the logits over the time"
    panel = _Panel(f"logits, {tokens} tokens, mean, forward + backward", "vocabulary", ylabel, axes={"ylim": (0, None)})
    panel.ticks = {place: f"{size:,}" for place, size in enumerate(sizes)}
    for record in sweep:
        floor = {"color": "black", "linestyle": ":"} if kind(record) == "floor" else {}
        speed = 2 * record.case.logits_bytes / (record.seen or 1) / 1e9
        panel.add(record.contender, (sizes.index(record.case.vocabulary), speed), **floor)
    return [panel]


def _ranks(records: Sequence[Record]) -> list[_Panel]:
    """Return time and peak memory of the suite "sharded" against the number of GPUs."""
    panels = []
    sharded = sorted((record for record in records if record.case.function == "sharded"), key=lambda r: r.case.sizes)
    for sizes, group in groupby(sharded, key=lambda record: record.case.sizes):
        left = _Panel(f"{sizes}: time", "ranks", "ms in a loop, forward + backward", axes={"ylim": (0, None)})
        right = _Panel(f"{sizes}: memory", "ranks", "peak MiB above the inputs, a rank", axes={"ylim": (0, None)})
        for record in group:
            ranks = record.case.ranks
            left.ticks = right.ticks = {**left.ticks, ranks: str(ranks)}
            floor = {"color": "black", "linestyle": ":"} if kind(record) == "floor" else {}
            left.add(record.contender, (ranks, (record.seen or 0) * 1e3), **floor)
            if record.peak_bytes is not None:
                right.add(record.contender, (ranks, record.peak_bytes / _MIB), **floor)
        panels += [left, right]
    return panels
