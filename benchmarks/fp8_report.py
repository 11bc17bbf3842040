"""The tables and the picture of the results of `benchmarks.fp8`, for the terminal and for documents."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import Table

__all__ = ["draw", "make_table", "read"]

_COLORS = {"bfloat16": "black", "FP8": "#1b7f5c", "FP8 throughout": "C3"}
_COMPARED = ("PyTorch", "FP8", "FP8 throughout")
_GRADIENTS = ("hidden states", "classifier", "rows of targets", "other rows", "tied embedding")


def read(path: Path, key: str) -> list[dict[str, Any]]:
    """Return the lines of a file that have a key; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [fields for fields in map(json.loads, lines) if key in fields]


def make_table(path: Path) -> Table:
    """Return the table of a file of losses or of errors."""
    errors = read(path, "data")
    return _errors(errors) if errors else _losses(read(path, "seed"))


def _losses(runs: Sequence[dict[str, Any]]) -> Table:
    """Return a row per seed and one of means, a cell per head.

    Losses in float32, of the last fifth of training and of held-out text, and what the head reported beyond the first.
    """
    cells: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for run in runs:
        (_, wide), (_, reported) = _windows(run, 5)[-1], _windows(run, 5, 2)[-1]
        for row in (str(run["seed"]), "mean"):
            numbers = wide, run["held out"][-1][1], reported - wide
            cells.setdefault(row, {}).setdefault(run["head"], []).append(numbers)
    cells["mean"] = cells.pop("mean")
    rows = []
    for row, heads in cells.items():
        means = [map(statistics.fmean, zip(*numbers, strict=True)) for numbers in heads.values()]
        rows.append((row, *("{:.3f}, {:.3f}, {:+.4f}".format(*each) for each in means)))
    return Table("", ("seed", *_COLORS), tuple(rows))


def _errors(records: Sequence[dict[str, Any]]) -> Table:
    """Return a row per data and scale; a cell has the errors of each head that is compared."""
    cases: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in records:
        case = record["data"], f"{record['scale']:g}", f"{record['mean loss']:.2f}"
        cases.setdefault(case, []).extend([record] * (record["head"] in _COMPARED))
    rows = []
    for case, heads in cases.items():
        losses = ", ".join(f"{head['loss']:+.4f}" for head in heads)
        errors = (", ".join(f"{100 * head[name]:.2f}" for head in heads) for name in _GRADIENTS)
        rows.append((*case, losses, *errors))
    return Table("", ("data", "scale", "mean loss", "loss", *_GRADIENTS), tuple(rows))


def _windows(run: dict[str, Any], count: int, column: int = 1) -> list[tuple[float, float]]:
    """Return the mean steps and losses of this many equal parts of training."""
    points = run["training"]
    parts = [points[len(points) * part // count : len(points) * (part + 1) // count] for part in range(count)]
    return [(statistics.fmean(p[0] for p in part), statistics.fmean(p[column] for p in part)) for part in parts]


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw float32 losses: means of a 25th of training, their difference to bfloat16, and those of held-out text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 4.4), layout="constrained")
    bases = {run["seed"]: _windows(run, 25) for run in runs if run["head"] == "bfloat16"}
    handles = {}
    for run in runs:
        look = {"color": _COLORS[run["head"]], "linestyle": ("-", "--", ":")[run["seed"] % 3], "linewidth": 1.2}
        points, base = _windows(run, 25), bases[run["seed"]]
        (handles[f"{run['head']}, seed {run['seed']}"],) = axes[0].plot(*zip(*points, strict=True), **look)
        axes[1].plot([x for x, _ in points], [y - z for (_, y), (_, z) in zip(points, base, strict=True)], **look)
        axes[2].plot(*zip(*run["held out"], strict=True), marker="o", markersize=3, **look)
    titles = ("training text", "training text, minus bfloat16", "held-out text")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("loss in float32")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(bases), frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
