"""The plots of a run: bars of time and memory, time against peak memory, and bandwidth against the vocabulary.

Times are loop times, if these were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.records import Record
from benchmarks.tables import kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["save_plots"]

_OURS = "#1b7f5c"
_QUACK = "#2f6db5"
_COLORS = {
    "torch": "#8c8c8c",
    "torch fp32 logits": "#4f4f4f",
    "torch.compile": "#d9a441",
    "torch.compile fp32 logits": "#d98f1f",
    "torch chunked": "#5b8db8",
    "Liger": "#c0504d",
    "Liger in place": "#c0504d",
    "CCE": "#7d5ba6",
    "quack in place": "#86b0dd",
    "xent": _OURS,
    "xent portable": "#53a386",
    "xent inplace": "#7cc4a4",
}
_MOST_COLUMNS = 3
_FEWEST_SIZES = 3


def save_plots(records: Sequence[Record], stem: Path) -> list[Path]:
    """Write `stem`-bars.png, `stem`-frontier.png and `stem`-bandwidth.png, those for which there are results."""
    measured = [record for record in records if record.seen is not None and record.status == "measured"]
    written = []
    for name, draw in (("bars", _bars), ("frontier", _frontier), ("bandwidth", _bandwidth)):
        figure = draw(measured)
        if figure is not None:
            machine = measured[0].machine
            where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
            figure.suptitle(f"{where}, torch {machine['versions'].get('torch')}")
            written.append(stem.with_name(f"{stem.name}-{name}.png"))
            figure.savefig(written[-1], dpi=130)
    return written


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.close("all")
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    return figure, list(axes.flat)


def _color(name: str) -> str:
    family = {"quack": _QUACK, "xent": "#a6d9c2"}.get(name.partition(" ")[0], "#a05195")
    return _COLORS.get(name, family)


def _bars(records: Sequence[Record]) -> Figure | None:
    """Draw time and memory as ratios to the base of each case, with the numbers beside the bars."""
    drawn = [record for record in records if kind(record) != "floor"]
    if not drawn:
        return None
    cases = len({record.case for record in drawn})
    with_memory = any(record.quantity("memory") for record in drawn)
    figure, all_axes = _figure(1, 1 + with_memory, (7 * (1 + with_memory), 0.3 * (len(drawn) + cases) + 1.5))
    _draw_bars(all_axes[0], drawn, _time_ratio, lambda record: f"{(record.seen or 0) * 1e3:.3g} ms")
    all_axes[0].set_title("time, against the base")
    if with_memory:
        _draw_bars(all_axes[1], drawn, _memory_ratio, lambda record: f"{(record.peak_bytes or 0) / 2**20:.0f} MiB")
        all_axes[1].set_title("peak memory above the start, against the base")
        all_axes[1].tick_params(labelleft=False)
    return figure


def _time_ratio(record: Record) -> float | None:
    return 1.0 if record.contender == record.base else record.quantity("loop") or record.quantity("time")


def _memory_ratio(record: Record) -> float | None:
    return 1.0 if record.contender == record.base else record.quantity("memory")


def _draw_bars(
    axes: Axes, records: Sequence[Record], ratio: Callable[[Record], float | None], text: Callable[[Record], str]
) -> None:
    position, labels, places = 0, [], []
    for title, group in groupby(records, key=lambda record: record.case.title):
        block = list(group)
        places.append(position + (len(block) - 1) / 2)
        labels.append(title.replace(", ", "\n"))
        for record in block:
            length = ratio(record)
            if length is not None:
                axes.barh(position, length, height=0.85, color=_color(record.contender))
                note = f"{length:.2f}  {record.contender}  {text(record)}"
                axes.annotate(note, (length, position), (4, 0), textcoords="offset points", va="center", size=7)
            position += 1
        position += 1
    axes.axvline(1, color="lightgray", linewidth=0.8, zorder=0)
    axes.invert_yaxis()
    axes.margins(x=0.35, y=0.01)
    axes.set_yticks(places, labels, size=7)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _frontier(records: Sequence[Record]) -> Figure | None:
    """Draw one panel per plain linear case on a GPU: contenders as points, the products as a horizontal line."""
    plain = [
        record
        for record in records
        if record.case.function == "linear" and record.case.device != "cpu" and record.case.suite != "host"
        if record.case.backward and not (record.case.frozen or record.case.ignored or record.case.options)
        if record.case.reduction == "mean"
    ]
    panels = [list(group) for _, group in groupby(plain, key=lambda record: record.case)]
    if not panels:
        return None
    columns = min(len(panels), _MOST_COLUMNS)
    rows = ceil(len(panels) / columns)
    figure, all_axes = _figure(rows, columns, (5.2 * columns, 4.4 * rows + 1))
    for axes, panel in zip(all_axes, panels, strict=False):
        _draw_head(axes, panel)
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    drawn = [pair for axes in all_axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in drawn}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw_head(axes: Axes, panel: Sequence[Record]) -> None:
    case = panel[0].case
    for record in panel:
        name, milliseconds = record.contender, (record.seen or 0) * 1e3
        if record.peak_bytes is None:
            axes.axhline(milliseconds, color="black", linewidth=0.8, linestyle=":", label="the products alone")
            continue
        marker, size = ("D", 7) if kind(record) == "ours" else ("o", 5)
        point = (record.peak_bytes / 2**20, milliseconds)
        family, _, chunk = name.partition("quack ")
        axes.plot(*point, marker, color=_color(name), markersize=size, label="quack, by its chunk" if chunk else family)
        axes.annotate(chunk, point, (4, 4), textcoords="offset points", size=7, color=_QUACK)
    axes.axvline(case.gradient_bytes / 2**20, color="lightgray", linewidth=0.8, zorder=0)
    axes.set_title(f"{case.tokens}x{case.hidden}x{case.vocabulary}, {case.dtype}", size=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.1, y=0.1)
    axes.set_xlabel("peak MiB above the inputs (grey line: the gradients alone)", size=8)
    axes.set_ylabel("ms, forward + backward", size=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _bandwidth(records: Sequence[Record]) -> Figure | None:
    """Draw the bandwidth over the vocabularies of the suite "logits": one read and one write, divided by the time."""
    sweep = [record for record in records if record.case.suite == "logits"]
    tokens = sorted({record.case.tokens for record in sweep})[:1]
    sweep = [record for record in sweep if record.case.tokens in tokens]
    sizes = sorted({record.case.vocabulary for record in sweep})
    if len(sizes) < _FEWEST_SIZES:
        return None
    figure, (axes,) = _figure(1, 1, (10, 5.5))
    for name in dict.fromkeys(record.contender for record in sweep):
        mine = [record for record in sweep if record.contender == name and record.seen]
        mine.sort(key=lambda record: record.case.vocabulary)
        places = [sizes.index(record.case.vocabulary) for record in mine]
        speeds = [2 * record.case.logits_bytes / (record.seen or 1) / 1e9 for record in mine]
        floor = bool(mine) and kind(mine[0]) == "floor"
        color = "black" if floor else _color(name)
        axes.plot(places, speeds, ":" if floor else "-", marker="o", markersize=4, color=color, label=name)
    axes.set_title(f"logits, {tokens[0]} tokens, mean, forward + backward", size=10)
    axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("vocabulary")
    axes.set_ylabel("GB/s: one read and one write of the logits over the time")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axes.spines[["top", "right"]].set_visible(False)
    return figure
