"""The progress display of the training: a live bar in a terminal, a line from time to time in a log file."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Bar", "training_bar"]

LINES_IN_A_LOG = 6


class Bar:
    """The progress of both runs. `advance` is called after each step."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._steps = steps
        self._done = 0
        self._task = progress.add_task("training", total=steps, losses="")

    def advance(self, losses: dict[str, float]) -> None:
        """Show one more step and its losses."""
        self._done += 1
        shown = "   ".join(f"{name} {loss:.5f}" for name, loss in losses.items())
        self._progress.update(self._task, advance=1, losses=shown)
        console = self._progress.console
        if not console.is_terminal and (self._done * LINES_IN_A_LOG) % self._steps < LINES_IN_A_LOG:
            console.print(f"step {self._done}/{self._steps}   loss: {shown}")


@contextmanager
def training_bar(steps: int, console: Console) -> Iterator[Bar]:
    """Show a progress bar of `steps` steps, with the latest losses."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps   loss: [bold]{task.fields[losses]}[/]"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Bar(progress, steps)
