"""The plot of training speed against peak memory, one panel for each model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.training.measure import Result

__all__ = ["save_plot"]

_GIB = 2**30
_STYLES = {
    "plain": ("black", "o", "transformers alone"),
    "xent": ("#1b7f5c", "D", "xent"),
    "Liger": ("#c0504d", "s", "Liger-Kernel's head"),
    "CCE": ("#d9a441", "^", "Cut Cross Entropy"),
    "torch": ("#4f6fa8", "v", "PyTorch's chunked operator"),
}


def save_plot(results: Sequence[Result], title: str, path: Path) -> None:
    """Write the plot. Filled markers are with gradient checkpointing, open ones without."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [result for result in results if result["status"] == "measured" and result["peak"] is not None]
    models = list(dict.fromkeys(result["model"] for result in measured))
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(3.9 * len(models), 3.6), squeeze=False, layout="constrained"
    )
    for model, axes in zip(models, panels[0], strict=True):
        for result in measured:
            if result["model"] == model:
                color, marker, label = _STYLES[result["variant"]]
                speed = result["tokens"] / statistics.median(result["rounds"]) / 1e3
                filled = color if result["checkpointing"] else "none"
                axes.plot(
                    result["peak"] / _GIB,
                    speed,
                    marker,
                    color=color,
                    markerfacecolor=filled,
                    markersize=9,
                    label=label if result["checkpointing"] else f"{label}, no checkpointing",
                )
        axes.set(title=f"{model}, {measured[0]['tokens']} tokens", xlabel="peak memory, GiB", xlim=(0, None))
        low, high = axes.get_ylim()
        axes.set(ylabel="thousand tokens per second", ylim=(0.85 * low, 1.05 * high))
        axes.grid(alpha=0.3)
    named = dict(pair for axes in panels[0] for pair in zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
