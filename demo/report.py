"""The result of the demo: one sentence, then the table."""

import statistics
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from demo.losses import PYTORCH, XENT
from demo.results import MIB, Results

__all__ = ["gain", "print_report"]

Row = tuple[str, str, str, str]
"""(quantity, PyTorch's value, xent's value, comparison)"""


def print_report(results: Results, console: Console) -> None:
    """Print what the user gains, the table, and how closely the two runs agree."""
    console.print(f"[bold]{gain(results)}[/]\n")
    title = f"{results.device}; each step {results.tokens_per_step} tokens x {results.vocabulary} classes, float32"
    table = Table(title=title, title_justify="left")
    table.add_column(no_wrap=True)
    for heading in (PYTORCH, f"{XENT} ({results.backend})", f"{XENT} / {PYTORCH}"):
        table.add_column(heading, justify="right")
    for section in (_learning(results), _exactness(results), _speed(results), _memory(results)):
        for row in section:
            table.add_row(*row)
        table.add_section()
    console.print(table)
    differences = results.differences
    console.print(
        f"The two training losses differ by at most [bold]{max(differences):.1e}[/] of their value "
        f"over all {len(differences)} steps, by {statistics.fmean(differences):.1e} on average."
    )


def gain(results: Results) -> str:
    """Return in one sentence what xent changes: time and memory of the loss, and how far apart the losses are."""
    one, other = results.runs[PYTORCH].loss_time, results.runs[XENT].loss_time
    tokens, peak = max(results.memory.items())
    pytorch, xent = peak[PYTORCH], peak[XENT]
    time = (
        f"{results.ratio('loss_seconds'):.2f} times as long ({1e3 * other:.0f} ms a step in place of {1e3 * one:.0f})"
    )
    memory = ""
    if pytorch is not None and xent is not None:
        memory = f", needs {xent / MIB:.0f} MiB in place of {pytorch / MIB:.0f} (for {tokens} tokens),"
    return (
        f"With xent the loss takes {time}{memory} and differs from {PYTORCH}'s by at most "
        f"{max(results.differences):.0e} of its value."
    )


def _learning(results: Results) -> Iterator[Row]:
    pytorch, xent = results.runs[PYTORCH], results.runs[XENT]
    for label, one, other in (
        ("first training loss", pytorch.losses[0], xent.losses[0]),
        ("last training loss", pytorch.losses[-1], xent.losses[-1]),
        ("loss on unseen files", pytorch.validation_loss, xent.validation_loss),
    ):
        yield label, f"{one:.5f}", f"{other:.5f}", f"{abs(other - one) / one:.1e} apart"


def _exactness(results: Results) -> Iterator[Row]:
    pytorch, xent = results.errors[PYTORCH], results.errors[XENT]
    # No ratio for the loss: the rounding of a single number is chance.
    yield "loss error against float64", f"{pytorch.loss:.1e}", f"{xent.loss:.1e}", ""
    for label, one, other in (
        ("hidden gradient error", pytorch.hidden_gradient, xent.hidden_gradient),
        ("classifier gradient error", pytorch.weight_gradient, xent.weight_gradient),
    ):
        yield label, f"{one:.1e}", f"{other:.1e}", _times(one, other)


def _speed(results: Results) -> Iterator[Row]:
    pytorch, xent = results.runs[PYTORCH], results.runs[XENT]
    step, loss = results.ratio("step_seconds"), results.ratio("loss_seconds")
    yield "time of a step", f"{1e3 * pytorch.step_time:.1f} ms", f"{1e3 * xent.step_time:.1f} ms", f"{step:.2f}"
    yield "  of which the loss", f"{1e3 * pytorch.loss_time:.1f} ms", f"{1e3 * xent.loss_time:.1f} ms", f"{loss:.2f}"
    one, other = results.tokens_per_second(PYTORCH), results.tokens_per_second(XENT)
    yield "tokens per second", f"{one:,.0f}", f"{other:,.0f}", f"{1 / step:.2f}"


def _memory(results: Results) -> Iterator[Row]:
    for tokens, peak in results.memory.items():
        one, other = peak[PYTORCH], peak[XENT]
        label = f"memory of the loss, {tokens} tokens"
        if one is None or other is None:
            yield label, "not measured", "not measured", ""
        else:
            yield label, f"{one / MIB:.0f} MiB", f"{other / MIB:.0f} MiB", _times(one, other)


def _times(one: float, other: float) -> str:
    return f"{other / one:.2f}" if one else ""
