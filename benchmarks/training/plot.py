"""The plot of peak memory per step against the sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["save_plot"]

_COLORS = {"plain": "#8c8c8c", "patched": "#1b7f5c"}
_GIB = 2**30


def save_plot(results: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Write the plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for variant, color in _COLORS.items():
        chosen = [result for result in results if result["variant"] == variant and result["step"] is not None]
        lengths, peaks = [result["length"] for result in chosen], [result["step"] / _GIB for result in chosen]
        axes.plot(lengths, peaks, "o-", color=color, label=variant)
    axes.set(xlabel="tokens", ylabel="peak memory of a step (GiB)", title=title, ylim=(0, None), xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
