"""The command line: measure suites of cases, write JSON lines and plots, print tables.

How each number is measured: `benchmarks.clock` (times), `benchmarks.devices` and `benchmarks.memory` (peaks),
`benchmarks.measure` (rounds and ratios), `benchmarks.truth` (errors).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks import cases as described
from benchmarks.cases import Case, quick
from benchmarks.contenders import find_contender
from benchmarks.devices import DEVICES, default_device
from benchmarks.facts import machine_facts, merge
from benchmarks.plot import save_plots
from benchmarks.process import NotMeasured
from benchmarks.records import Record, load_records, write_records
from benchmarks.report import make_console, print_report

__all__ = ["main", "measure_all"]

_SUITES = {device: described.SUITES[device] for device in DEVICES}
_DEFAULT_OUT = Path(__file__).resolve().parent / "out"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen suites; return 0, or 1 if a contender failed, or 2 if the device does not exist."""
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.show:
        records = [record for path in options.show for record in load_records(path)]
        return _show(make_console(), records, options.out / options.show[0].stem)
    from benchmarks.measure import Measurement, Plan

    device, suites = _choose(options)
    gpu = device == "cuda"
    minutes = options.minutes or (7.0 if gpu else float("inf"))
    plan = Plan(
        repeats=options.repeats or (3 if options.quick else 9 if gpu else 7),
        budget=(0.5 if gpu else 2.0) if options.quick else 20.0,
        deadline=time.monotonic() + 60 * minutes,
        ranks=options.gpus,
    )
    try:
        with Measurement(device, plan) as measurement:
            machine = merge(machine_facts(), measurement.facts)

            def measure(case: Case, progress: Callable[[str], None]) -> list[Record]:
                return measurement.measure(case, machine, progress)

            return max(_run(options, device, suite, measure) for suite in suites)
    except NotMeasured as failure:
        print(f"cannot measure on {options.gpus} x {device}: {failure}; --device cpu measures here", file=sys.stderr)
        return 2


def _choose(options: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the device and its suites."""
    device = options.device or default_device()
    usual = [name for name in _SUITES[device] if name != "sharded"]
    if options.gpus > 1:
        return device, ["sharded"]
    if unknown := [name for name in options.suite or [] if name not in (*usual, "all")]:
        _parser().error(f"{device} has no suite {unknown[0]!r}, it has: {', '.join(usual)}")
    return device, usual if "all" in (options.suite or []) else options.suite or usual[:1]


def _cases(options: argparse.Namespace, device: str, suite: str) -> list[Case]:
    cases = list(_SUITES[device][suite])
    if suite == "sharded":
        known = [case for case in cases if case.ranks == options.gpus]
        cases = known or [replace(case, ranks=options.gpus, goals=()) for case in cases if case.ranks == cases[0].ranks]
    cases = [quick(case) if options.quick else case for case in cases]
    if options.ours:
        cases = [replace(case, contenders=_without_peers(case)) for case in cases]
    return [case for case in cases if options.only in case.title]


def _without_peers(case: Case) -> tuple[str, ...]:
    base, *others = case.contenders
    return base, *(name for name in others if find_contender(case.function, name).kind == "ours")


def _run(options: argparse.Namespace, device: str, suite: str, measure: Callable[..., list[Record]]) -> int:
    """Measure one suite, write and show it. Nothing is started after the time limit."""
    part = "-quick" if options.quick else "-part" if options.only or options.ours else ""
    ranks = f"-{options.gpus}" if options.gpus > 1 else ""
    stem = options.out / f"{'gpu' if device == 'cuda' else device}-{suite}{ranks}{part}"
    lines = stem.with_suffix(".jsonl")
    known = load_records(lines) if options.resume and lines.exists() else []
    records, left = measure_all(_cases(options, device, suite), measure, lines, known)
    console = make_console()
    status = _show(console, records, stem) if records else 0
    console.print(f"written: {lines}", soft_wrap=True)
    if left:
        console.print(f"[yellow]out of time[/yellow]  {suite}: {len(left)} cases left, --resume goes on with them")
    return status


def measure_all(
    cases: Sequence[Case], measure: Callable[..., list[Record]], lines: Path, known: Sequence[Record] = ()
) -> tuple[list[Record], list[Case]]:
    """Measure all cases that have no known record, with a progress bar; return all records and the cases left.

    All records are written to `lines` whenever a case is done.
    """
    from benchmarks.measure import OutOfTime

    records = list(known)
    left = [case for case in cases if all(record.case != case for record in records)]
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=len(left))
        while left:
            case = left[0]
            try:
                records += measure(case, lambda name, of=case: bar.update(task, description=f"{of.title}: {name}"))
            except OutOfTime:
                break
            lines.write_text("".join(write_records(records)), encoding="utf-8")
            del left[0]
            bar.advance(task)
    return records, left


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
    add: Any = parser.add_argument
    add("--suite", nargs="+", help="what to measure (default: the first suite of the device)")
    add("--device", choices=list(DEVICES), help="where (default: the NVIDIA GPU, if there is one)")
    add("--gpus", type=_positive, default=1, help="measure shards of a vocabulary, with one process each")
    add("--only", default="", metavar="TEXT", help="cases that have this in their title, e.g. 50257 or softcap")
    add("--ours", action="store_true", help="no peers: the base and xent alone")
    add("--quick", action="store_true", help="small sizes and few repeats: does everything still run?")
    add("--resume", action="store_true", help="keep what the file of results has, and measure what it has not")
    add("--out", type=Path, default=_DEFAULT_OUT, help="folder of the results (default: %(default)s)")
    add("--repeats", type=_positive, help="rounds, if time allows (CPU: 7, GPU: 9, quick: 3)")
    add("--minutes", type=float, help="begin nothing new after so many (default: 7 on a GPU, no end on a CPU)")
    add("--show", type=Path, nargs="+", metavar="JSONL", help="measure nothing, show these results")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number
