"""The two pictures of a GPU's run: time against peak memory, and effective bandwidth against the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case
from benchmarks.contenders import find_contender
from benchmarks.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["save_plots"]

_OURS = "#1b7f5c"
_COLORS = {
    "torch": "#8c8c8c",
    "torch fp32 logits": "#4f4f4f",
    "torch.compile": "#e3bd6c",
    "torch.compile fp32 logits": "#d98f1f",
    "torch chunked": "#5b8db8",
    "Liger": "#c0504d",
    "Liger in place": "#c0504d",
    "CCE": "#7d5ba6",
    "quack": "#2f6db5",
    "quack in place": "#86b0dd",
    "xent": _OURS,
    "xent inplace": "#7cc4a4",
}
_QUACK_COLOR = "#2f6db5"
_MOST_COLUMNS = 3
_FEWEST_SIZES = 3


def save_plots(records: Sequence[Record], machine: dict[str, Any], stem: Path) -> list[Path]:
    """Write `stem`-frontier.png and `stem`-bandwidth.png, each only if there is something to show; return the paths."""
    measured = [record for record in records if record.status == "measured"]
    drawn = {"frontier": _frontier(measured), "bandwidth": _bandwidth(measured)}
    written = []
    for name, figure in drawn.items():
        if figure is not None:
            versions = machine["versions"]
            figure.suptitle(f"{machine.get('gpu', 'no GPU')}, bfloat16, torch {versions['torch']}")
            written.append(stem.with_name(f"{stem.name}-{name}.png"))
            figure.savefig(written[-1], dpi=130)
    return written


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    return figure, list(axes.flat)


def _frontier(records: Sequence[Record]) -> Figure | None:
    """One panel for each head: peers are points, xent is a curve over its workspace, the products are a level line."""
    whole = [record for record in records if _is_whole(record.case)]
    heads = [record for record in whole if record.case.suite == "heads"]
    panels = [list(group) for _, group in groupby(heads or whole, key=lambda record: record.case)]
    panels = [panel for panel in panels if any(record.peak_bytes for record in panel)]
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


def _is_whole(case: Case) -> bool:
    is_head = case.function == "linear" and case.suite != "tokens"
    return is_head and case.backward and not case.frozen and not case.ignored


def _draw_head(axes: Axes, panel: Sequence[Record]) -> None:
    case = panel[0].case
    curve = []
    for record in panel:
        name = record.contender
        if record.milliseconds is None:
            continue
        if record.peak_bytes is None:
            line = {"color": "black", "linewidth": 0.8, "linestyle": ":"}
            axes.axhline(record.milliseconds, label="the three products alone", **line)
            continue
        point = (record.peak_bytes / 2**20, record.milliseconds)
        if name == "xent":
            axes.plot(*point, "D", color=_OURS, markersize=7, zorder=3, label=name)
        elif find_contender("linear", name).kind == "ours":
            curve.append((*point, name.removeprefix("xent ").removesuffix(" MiB")))
        elif name.startswith("quack "):
            axes.plot(*point, "o", color=_QUACK_COLOR, markersize=5, label="quack, by its chunk")
            _write(axes, name.removeprefix("quack "), point, _QUACK_COLOR)
        else:
            axes.plot(*point, "o", color=_COLORS.get(name, "black"), markersize=5, label=name)
    if curve:
        across, up, workspaces = zip(*curve, strict=True)
        axes.plot(across, up, "o-", color=_OURS, linewidth=1.2, markersize=3.5, label="xent, by its workspace in MiB")
        for x, y, workspace in zip(across, up, workspaces, strict=True):
            _write(axes, workspace, (x, y), _OURS)
    axes.axvline(case.gradient_bytes / 2**20, color="lightgray", linewidth=0.8, zorder=0)
    head = f"{case.model}, " if case.model else ""
    axes.set_title(f"{head}{case.tokens}x{case.hidden}x{case.vocabulary}", size=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.1, y=0.1)
    axes.set_xlabel("peak MiB above the inputs (grey line: the gradients alone)", size=8)
    axes.set_ylabel("ms, forward + backward", size=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _write(axes: Axes, text: str, point: tuple[float, float], color: str) -> None:
    axes.annotate(text, point, (4, 4), textcoords="offset points", size=7, color=color)


def _bandwidth(records: Sequence[Record]) -> Figure | None:
    """Curves over the vocabulary of mean, forward + backward; of cases that differ in tokens only, the first one."""
    chosen = [r for r in records if r.case.function == "logits" and r.case.backward and r.case.reduction == "mean"]
    sweep = [record for record in chosen if record.case.suite == "vocabulary"] or chosen
    sizes = sorted({record.case.vocabulary for record in sweep})
    if len(sizes) < _FEWEST_SIZES:
        return None
    figure, (axes,) = _figure(1, 1, (10, 5.5))
    for name in dict.fromkeys(record.contender for record in sweep):
        mine = {r.case.vocabulary: r.bandwidth for r in reversed(sweep) if r.contender == name}
        places = [(size, mine[size]) for size in sizes if mine.get(size)]
        across, up = zip(*((size, (value or 0) / 1e9) for size, value in places), strict=True)
        floor = find_contender("logits", name).kind == "floor"
        label = f"one {name}" if floor else name
        color = "black" if floor else _COLORS.get(name, "#a05195")
        axes.plot(across, up, ":" if floor else "-", marker="o", markersize=4, color=color, label=label)
    tokens = sorted({record.case.tokens for record in sweep})
    axes.set_title(f"logits, mean, forward + backward, {' or '.join(map(str, tokens))} tokens", size=10)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45, ha="right", size=8)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("vocabulary")
    axes.set_ylabel("GB/s: one read and one write of the logits over the time")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axes.spines[["top", "right"]].set_visible(False)
    return figure
