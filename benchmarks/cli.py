"""The command line: which cases, how long, where to; measures, shows a table, and writes JSON lines and a PNG."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.cases import SUITES, Case, select_cases
from benchmarks.machine import machine_facts
from benchmarks.measure import Plan, measure_case
from benchmarks.plot import save_plot
from benchmarks.records import Record
from benchmarks.report import print_report

__all__ = ["main"]

_DEFAULT_OUT = Path(__file__).resolve().parent / "out"
_WIDTH_OF_FILES = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen suites; 0 if everything that could run has run, 1 if a contender failed."""
    options = _parser().parse_args(arguments)
    suites = list(SUITES) if options.suite == "all" else [options.suite]
    cases = select_cases(suites, quick=options.quick, full=options.full)
    plan = Plan(
        repeats=options.repeats or (3 if options.quick else 7),
        budget=2.0 if options.quick else 10.0,
        threads=options.threads,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / (f"{options.suite}-quick" if options.quick else options.suite)
    machine = machine_facts()
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_FILES)

    records = _measure(cases, plan, machine, stem.with_suffix(".jsonl"))
    for suite in suites:
        print_report(console, suite, [each for each in records if each.case.suite == suite], machine)
    save_plot(records, machine, stem.with_suffix(".png"))
    console.print(f"written: {stem}.jsonl, {stem}.png", soft_wrap=True)
    return int(any(record.status == "failed" for record in records))


def _measure(cases: Sequence[Case], plan: Plan, machine: dict[str, object], lines: Path) -> list[Record]:
    """Measure with a live progress bar; every case is on disk as soon as it is done."""
    records: list[Record] = []
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar, lines.open("w", encoding="utf-8") as file:
        task = bar.add_task("starting", total=sum(len(case.contenders) for case in cases))
        done = 0
        for case in cases:
            turn = [-1]

            def show(name: str, case: Case = case, done: int = done, turn: list[int] = turn) -> None:
                if name in case.contenders:
                    turn[0] += 1
                bar.update(task, description=f"{case.title}: {name}", completed=done + max(turn[0], 0))

            found = measure_case(case, plan, machine, show)
            records += found
            file.writelines(record.to_json() + "\n" for record in found)
            file.flush()
            done += len(case.contenders)
        bar.update(task, description="done", completed=done)
    return records


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time and peak memory of xent beside PyTorch, each measurement in a process of its own.",
    )
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="bars", help="what to measure (default: bars)")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats: does everything still run?")
    parser.add_argument("--full", action="store_true", help="also run contenders that take minutes at their size")
    parser.add_argument("--out", type=Path, default=_DEFAULT_OUT, help="folder of the results (default: %(default)s)")
    parser.add_argument("--threads", type=_positive, help="threads of each process (default: the framework's choice)")
    parser.add_argument("--repeats", type=_positive, help="pairs per contender, if time allows (default: 7, quick: 3)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number
