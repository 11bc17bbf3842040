"""The plot at the end of the demo: both training losses, and the memory and time of each."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into files, and works without a display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from demo.losses import PYTORCH, XENT
from demo.results import MIB, Results

__all__ = ["draw"]

COLOURS = {PYTORCH: "#e08a2e", XENT: "#1f5fa8"}
PALE = 0.35
NO_DIFFERENCE = 1e-9
"""The position on the logarithmic axis of losses that are equal to the last bit; float32 has no smaller difference."""


def draw(results: Results, path: Path) -> None:
    """Write the plot as a PNG file."""
    figure, axes = plt.subplot_mosaic(
        [["losses", "memory"], ["losses", "memory"], ["losses", "time"], ["differences", "time"]],
        figsize=(13, 7.5),
        width_ratios=[1.5, 1],
        layout="constrained",
    )
    figure.suptitle(
        f"One model, trained twice from the same seed on {results.device}: "
        f"{results.tokens_per_step:,} tokens x {results.vocabulary:,} classes per step, float32",
        fontsize=13,
    )
    _draw_losses(axes["losses"], results)
    _draw_differences(axes["differences"], results)
    _draw_memory(axes["memory"], results)
    _draw_time(axes["time"], results)
    for part in axes.values():
        part.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_losses(axes: Axes, results: Results) -> None:
    steps = range(1, len(results.differences) + 1)
    for name, label, width, alpha in (
        (PYTORCH, f"{PYTORCH}: linear, then cross_entropy", 6.0, 0.6),
        (XENT, f"{XENT}: linear_cross_entropy, backend {results.backend}", 1.6, 1.0),
    ):
        losses = results.runs[name].losses
        axes.plot(steps, losses, color=COLOURS[name], linewidth=width, alpha=alpha, label=label)
    axes.set_title(f"The losses agree at every step to {max(results.differences):.1e} of their value", loc="left")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)


def _draw_differences(axes: Axes, results: Results) -> None:
    differences = [difference or NO_DIFFERENCE for difference in results.differences]
    axes.semilogy(range(1, len(differences) + 1), differences, ".", color="0.35")
    axes.set_ylim(NO_DIFFERENCE / 3, max(1e-3, 3 * max(differences)))
    axes.set_yticks([NO_DIFFERENCE, 1e-7, 1e-5, 1e-3], ["none", "1e-7", "1e-5", "1e-3"], minor=False)
    axes.set_title("Relative difference of the two losses", loc="left")
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)


def _draw_memory(axes: Axes, results: Results) -> None:
    """Draw one pair of bars per number of tokens, to show which memory grows with it."""
    for name, shift in ((PYTORCH, -0.2), (XENT, 0.2)):
        heights = [(peak[name] or 0) / MIB for peak in results.memory.values()]
        bars = axes.bar([place + shift for place in range(len(heights))], heights, 0.36, color=COLOURS[name])
        axes.bar_label(bars, [f"{name}\n{height:,.0f} MiB" for height in heights], padding=2)
    axes.set_xticks(range(len(results.memory)), [f"{tokens:,} tokens" for tokens in results.memory])
    axes.set_title(f"Peak memory of the loss{_shares(results.memory.values())}", loc="left")
    axes.set_ylabel("MiB beyond the inputs")
    axes.margins(y=0.18)


def _draw_time(axes: Axes, results: Results) -> None:
    for row, name in enumerate((XENT, PYTORCH)):
        run = results.runs[name]
        loss, rest = 1e3 * run.loss_time, 1e3 * (run.step_time - run.loss_time)
        loss_bar = axes.barh(row, loss, 0.6, color=COLOURS[name])
        rest_bar = axes.barh(row, rest, 0.6, left=loss, color=COLOURS[name], alpha=PALE)
        axes.bar_label(loss_bar, [f"loss\n{loss:,.0f} ms"], label_type="center", color="white")
        axes.bar_label(rest_bar, [f"model and optimizer\n{rest:,.0f} ms"], label_type="center")
    axes.set_yticks([0, 1], [XENT, PYTORCH])
    share = results.ratio("step_seconds")
    axes.set_title(f"Time of a training step: {share:.0%} of {PYTORCH}'s", loc="left")
    axes.set_xlabel("milliseconds")


def _shares(peaks: Iterable[dict[str, int | None]]) -> str:
    """Return xent's memory as a share of PyTorch's, for each pair of bars; empty if it was not measured."""
    shares = [xent / pytorch for peak in peaks if (xent := peak[XENT]) and (pytorch := peak[PYTORCH])]
    return f": {' and '.join(f'{share:.0%}' for share in shares)} of {PYTORCH}'s" if shares else ": not measured"
