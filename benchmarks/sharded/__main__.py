"""The command line: measure, or with `plot` draw earlier results. See `benchmarks.sharded`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

import benchmarks.sharded
from benchmarks.cases import Case
from benchmarks.devices import DEVICES, default_device
from benchmarks.gpu.measure import GpuMeasurement, GpuPlan
from benchmarks.machine import machine_facts
from benchmarks.process import NotMeasured
from benchmarks.progress import measure_all
from benchmarks.records import Record, load_records
from benchmarks.report import print_report
from benchmarks.sharded.cases import make_cases
from benchmarks.sharded.plot import save_plot
from benchmarks.sharded.team import Team

__all__ = ["main"]

_WIDTH_OF_FILES = 240


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if a contender failed or the time limit was reached, or 2 if there are not enough devices."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_FILES)
    if arguments[:1] == ["plot"]:
        return _plot(console, arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        records, left = _measure(options)
    except NotMeasured as failure:
        print(f"cannot measure on {options.gpus} {options.device} ranks: {failure}", file=sys.stderr)
        return 2
    if records:
        print_report(console, "sharded", records)
        save_plot(records, options.out.with_suffix(".png"))
        console.print(f"written: {options.out}, {options.out.with_suffix('.png')}", soft_wrap=True)
    for case in left:
        console.print(f"[yellow]out of time[/yellow]  {case.title}", soft_wrap=True)
    return int(bool(left) or any(record.status == "failed" for record in records))


def _measure(options: argparse.Namespace) -> tuple[list[Record], list[Case]]:
    """Return the records, which are also written to disk, and the cases that were not measured for lack of time."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    machine = machine_facts()
    plan = GpuPlan(options.rounds, options.seconds, time.monotonic() + 60 * options.minutes)
    cases = make_cases(options.device, options.gpus, tuple(options.sizes or ()))
    with GpuMeasurement(options.device, plan, partial(Team, options.device, options.gpus)) as measurement:
        facts = measurement.facts
        machine |= facts | {"versions": machine["versions"] | facts["versions"]}

        def measure(case: Case, *, progress: Callable[[str], None]) -> list[Record]:
            return measurement.measure(case, machine, progress)

        return measure_all(cases, measure, options.out)


def _plot(console: Console, arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded plot", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="records of runs on 1, 2, 4, ... GPUs")
    parser.add_argument("--out", type=Path, help="the picture (default: beside the first file)")
    options = parser.parse_args(arguments)
    records = [record for path in options.files for record in load_records(path)]
    out = options.out or options.files[0].with_suffix(".png")
    if not save_plot(records, out):
        print("nothing was measured in these files", file=sys.stderr)
        return 1
    console.print(f"written: {out}", soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharded",
        description=benchmarks.sharded.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--gpus", type=int, default=2, help="how many, with one process each (%(default)s)")
    add("--device", choices=list(DEVICES), default=default_device(), help="the GPUs if there are any (%(default)s)")
    add("--out", type=Path, default=Path("benchmarks/out/sharded.jsonl"), metavar="JSONL", help="%(default)s")
    add("--sizes", type=_size, nargs="+", metavar="TOKENSxHIDDENxVOCABULARY", help="in place of the usual ones")
    add("--rounds", type=int, default=9, help="at most so many, fewer if they take longer than --seconds (9)")
    add("--seconds", type=float, default=20.0, help="for the rounds of a case (20)")
    add("--minutes", type=float, default=6.0, help="begin nothing new after so many (6)")
    return parser


def _size(text: str) -> tuple[int, int, int]:
    tokens, hidden, vocabulary = map(int, text.split("x"))
    return tokens, hidden, vocabulary


if __name__ == "__main__":
    sys.exit(main())
