"""The picture of a run: bars of time and memory for each case, curves over tokens and vocabulary for the sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["save_plot"]

_COLORS = {
    "torch": "#8c8c8c",
    "torch.compile": "#d9a441",
    "torch chunked": "#5b8db8",
    "xent": "#1b7f5c",
    "xent inplace": "#7cc4a4",
}
_OTHER_COLOR = "#a05195"


def save_plot(records: Sequence[Record], machine: dict[str, Any], path: Path) -> None:
    """Write a PNG with one row of two panels, time and memory, for every suite that has a measured record."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [record for record in records if record.status == "measured"]
    suites = list(dict.fromkeys(record.case.suite for record in measured))
    if not suites:
        return
    bar_count = sum(record.case.suite == "bars" for record in measured)
    heights = [max(3.0, 0.33 * bar_count) if suite == "bars" else 4.0 for suite in suites]
    figure, axes = pyplot.subplots(
        len(suites),
        2,
        figsize=(14, sum(heights) + 1),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for suite, (time_axes, memory_axes) in zip(suites, axes, strict=True):
        rows = [record for record in measured if record.case.suite == suite]
        if suite == "bars":
            _draw_bars(rows, time_axes, memory_axes)
        else:
            _draw_sweep(rows, suite, time_axes, memory_axes)
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, torch {machine['versions']['torch']}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_bars(records: Sequence[Record], time_axes: Axes, memory_axes: Axes) -> None:
    """Horizontal bars against the base of each case, with the absolute number written beside."""
    position, labels, places = 0.0, [], []
    for title, group in groupby(records, key=lambda record: record.case.title):
        block = list(group)
        places.append(position + (len(block) - 1) / 2)
        labels.append(title.replace(", ", "\n"))
        for record in block:
            is_base = record.contender == record.base
            if record.milliseconds is not None:
                ratio = 1.0 if is_base else record.quantity("time")
                _draw_bar(time_axes, position, record, ratio, f"{record.milliseconds:.0f} ms")
            if record.peak_bytes is not None:
                ratio = 1.0 if is_base else record.quantity("memory")
                _draw_bar(memory_axes, position, record, ratio, f"{record.peak_bytes / 2**20:.0f} MiB")
            position += 1
        position += 1
    for axes, quantity in ((time_axes, "time"), (memory_axes, "peak memory above the start")):
        axes.set_title(f"{quantity}, against the unfused computation")
        axes.axvline(1, color="lightgray", linewidth=0.8, zorder=0)
        axes.invert_yaxis()
        axes.margins(x=0.18)
        axes.set_yticks(places, labels if axes is time_axes else [""] * len(places))
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
    names = list(dict.fromkeys(record.contender for record in records))
    handles = [time_axes.barh([0], [0], color=_color(name)) for name in names]
    memory_axes.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=len(names), frameon=False)


def _draw_bar(axes: Axes, position: float, record: Record, ratio: float | None, text: str) -> None:
    """Nothing where the base is missing: there is no ratio then."""
    if ratio is None:
        return
    axes.barh(position, ratio, height=0.85, color=_color(record.contender))
    axes.annotate(f"{ratio:.2f}  {text}", (ratio, position), (4, 0), textcoords="offset points", va="center", size=8)


def _draw_sweep(records: Sequence[Record], suite: str, time_axes: Axes, memory_axes: Axes) -> None:
    """Logarithmic curves: a straight line of slope 1 grows with the size, a level one does not grow."""
    case = records[0].case
    fixed = f"{case.vocabulary} classes" if suite == "tokens" else f"{case.tokens} tokens"
    for name in dict.fromkeys(record.contender for record in records):
        mine = [record for record in records if record.contender == name]
        style: dict[str, Any] = {"marker": "o", "color": _color(name), "label": name}
        times = [(getattr(r.case, suite), r.milliseconds) for r in mine if r.milliseconds is not None]
        peaks = [(getattr(r.case, suite), r.peak_bytes / 2**20) for r in mine if r.peak_bytes is not None]
        beyond = [(getattr(r.case, suite), r.beyond_gradients / 2**20) for r in mine if r.beyond_gradients is not None]
        time_axes.plot(*zip(*times, strict=True), **style)
        memory_axes.plot(*zip(*peaks, strict=True), **style)
        memory_axes.plot(
            *zip(*beyond, strict=True), **style | {"label": f"{name}, beyond the gradients", "linestyle": ":"}
        )
    for axes, quantity in ((time_axes, "ms"), (memory_axes, "peak MiB above the start")):
        axes.set_title(f"linear, {case.dtype}, hidden {case.hidden}, {fixed}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        sizes = sorted({getattr(record.case, suite) for record in records})
        axes.set_xticks(sizes, [f"{size / 1024:g}k" for size in sizes])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("classes" if suite == "vocabulary" else suite)
        axes.set_ylabel(quantity)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)


def _color(name: str) -> str:
    return _COLORS.get(name, _OTHER_COLOR)
