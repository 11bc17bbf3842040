"""The command line: measure suites of cases, write JSON lines and plots, print tables."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Case
from benchmarks.contenders import find_contender
from benchmarks.devices import DEVICES, default_device
from benchmarks.gpu.measure import GpuMeasurement, GpuPlan
from benchmarks.machine import machine_facts
from benchmarks.measure import Plan, measure_case
from benchmarks.plot import save_plots
from benchmarks.process import NotMeasured
from benchmarks.progress import Measure, measure_all
from benchmarks.records import Record, load_records
from benchmarks.report import print_report
from benchmarks.suites import SUITES, select_cases
from benchmarks.tables import fill, make_tables

__all__ = ["main"]

_DEFAULT_OUT = Path(__file__).resolve().parent / "out"
_WIDTH_OF_FILES = 240


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen suites; return 0, or 1 if a contender failed, or 2 if the device does not exist."""
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_FILES)
    if options.show:
        return _show_files(console, options)

    device, suites = _choose(options)
    status = 0
    with ExitStack() as stack:
        try:
            measure = _measure(options, device, machine_facts(), stack)
            for suite in suites:
                status |= _run(console, options, device, suite, measure)
        except NotMeasured as failure:
            print(f"cannot measure on {device}: {failure}; --device cpu measures here", file=sys.stderr)
            return 2
    return status


def _choose(options: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the device and its suites. A suite that only one device has selects that device."""
    wanted = [name for name in options.suite or [] if name != "all"]
    homes = [device for device, suites in SUITES.items() if all(name in suites for name in wanted)]
    device = options.device or (homes[0] if len(homes) == 1 else default_device())
    if unknown := [name for name in wanted if name not in SUITES[device]]:
        _parser().error(f"{device} has no suite {unknown[0]!r}, it has: {', '.join(SUITES[device])}")
    if options.suite and not wanted:
        return device, list(SUITES[device])
    return device, wanted or [next(iter(SUITES[device]))]


def _run(console: Console, options: argparse.Namespace, device: str, suite: str, measure: Measure) -> int:
    """Measure one suite, write and show it. Nothing is started after the time limit."""
    cases = [case for case in select_cases(device, [suite], quick=options.quick) if options.only in case.title]
    if options.ours:
        cases = [replace(case, contenders=_without_peers(case)) for case in cases]
    part = "-quick" if options.quick else "-part" if options.only or options.ours else ""
    stem = options.out / f"{'gpu' if device == 'cuda' else device}-{suite}{part}"
    lines = stem.with_suffix(".jsonl")
    known = load_records(lines) if options.resume and lines.exists() else []
    records, left = measure_all(cases, measure, lines, known)
    status = 0
    if records:
        status = _show(console, records, stem)
        console.print(f"written: {lines}", soft_wrap=True)
    if left:
        console.print(f"[yellow]out of time[/yellow]  {suite}: {len(left)} cases left, --resume goes on with them")
    return status


def _without_peers(case: Case) -> tuple[str, ...]:
    base, *others = case.contenders
    return base, *(name for name in others if find_contender(case.function, name).kind == "ours")


def _measure(options: argparse.Namespace, device: str, machine: dict[str, Any], stack: ExitStack) -> Measure:
    """Yield the function that measures a case: in one process for all contenders, or on the CPU in one process each."""
    plan = Plan(
        repeats=options.repeats or (3 if options.quick else 7),
        budget=2.0 if options.quick else 10.0,
        threads=options.threads,
    )
    minutes = options.minutes or (7.0 if device == "cuda" else float("inf"))
    gpu_plan = GpuPlan(
        repeats=options.repeats or (3 if options.quick else 9),
        budget=0.5 if options.quick else 15.0,
        deadline=time.monotonic() + 60 * minutes,
    )
    turns: list[GpuMeasurement] = []

    def measure(case: Case, *, progress: Callable[[str], None]) -> list[Record]:
        if device == "cpu" and case.suite != "host":
            return measure_case(case, plan, machine, progress)
        if not turns:
            turns.append(stack.enter_context(GpuMeasurement(device, gpu_plan)))
        facts = turns[0].facts
        return turns[0].measure(case, machine | facts | {"versions": machine["versions"] | facts["versions"]}, progress)

    return measure


def _show_files(console: Console, options: argparse.Namespace) -> int:
    """Show earlier results as tables and plots, as Markdown, or in a document."""
    records = [record for path in options.show for record in load_records(path)]
    suites = {
        name: [r for r in records if r.case.suite == name] for name in dict.fromkeys(r.case.suite for r in records)
    }
    if options.into is not None:
        print(f"{options.into}: filled {', '.join(fill(options.into, suites)) or 'nothing'}")
    if options.markdown:
        for name, mine in suites.items():
            print(f"### {name}\n", *(table.markdown() for table in make_tables(mine)), sep="\n")
    if options.markdown or options.into is not None:
        pictures = save_plots(records, options.out / options.show[0].stem)
        print(f"pictures: {', '.join(map(str, pictures))}", file=sys.stderr)
        return 0
    return _show(console, records, options.out / options.show[0].stem)


def _show(console: Console, records: Sequence[Record], stem: Path) -> int:
    """Write the pictures and print a report of every suite; 1 if a contender failed."""
    pictures = save_plots(records, stem)
    for suite in dict.fromkeys(record.case.suite for record in records):
        print_report(console, suite, [record for record in records if record.case.suite == suite])
    console.print(f"pictures: {', '.join(map(str, pictures)) or 'none'}", soft_wrap=True)
    return int(any(record.status == "failed" for record in records))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time, peak memory and errors of xent beside PyTorch, on a GPU beside peers and floors too.",
    )
    names = list(dict.fromkeys(name for suites in SUITES.values() for name in suites))
    add = parser.add_argument
    add("--suite", choices=[*names, "all"], nargs="+", help="what to measure (default: the first suite of the device)")
    add("--device", choices=list(DEVICES), help="where (default: the NVIDIA GPU, if there is one)")
    add("--only", default="", metavar="TEXT", help="cases that have this in their title, e.g. 50257 or softcap")
    add("--ours", action="store_true", help="no peers: the base and xent alone")
    add("--quick", action="store_true", help="small sizes and few repeats: does everything still run?")
    add("--resume", action="store_true", help="keep what the file of results has, and measure what it has not")
    add("--out", type=Path, default=_DEFAULT_OUT, help="folder of the results (default: %(default)s)")
    add("--threads", type=_positive, help="threads of each process (default: the framework's choice)")
    add("--repeats", type=_positive, help="pairs or rounds, if time allows (CPU: 7, GPU: 9, quick: 3)")
    add("--minutes", type=float, help="begin nothing new after so many (default: 7 on a GPU, no end on a CPU)")
    add("--show", type=Path, nargs="+", metavar="JSONL", help="measure nothing, show these results")
    add("--markdown", action="store_true", help="with --show: print tables of Markdown")
    add("--into", type=Path, metavar="MD", help="with --show: fill this document between `<!-- measured: SUITE -->`s")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number
