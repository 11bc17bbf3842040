"""The command line: which cases, how long, where to; measures, shows a table, and writes JSON lines and pictures."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.devices import DEVICES, default_device
from benchmarks.gpu.measure import GpuMeasurement, GpuPlan
from benchmarks.gpu.plots import save_plots
from benchmarks.machine import machine_facts
from benchmarks.measure import Plan, measure_case
from benchmarks.plot import save_plot
from benchmarks.process import NotMeasured
from benchmarks.progress import Measure, measure_all
from benchmarks.records import Record, load_records
from benchmarks.report import print_report
from benchmarks.suites import SUITES, select_cases

__all__ = ["main"]

_DEFAULT_OUT = Path(__file__).resolve().parent / "out"
_WIDTH_OF_FILES = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen suites; 0 if all that could run did, 1 if a contender failed, 2 if there was no such device."""
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_FILES)
    if options.show:
        records = [record for path in options.show for record in load_records(path)]
        return _show(console, records, options.out / options.show[0].stem)

    device, suites = _choose(options)
    cases = select_cases(device, suites, quick=options.quick, full=options.full)
    name = suites[0] if len(suites) == 1 else "all"
    if device != "cpu" and not name.startswith("gpu-"):
        name = f"gpu-{name}"
    stem = options.out / (f"{name}-quick" if options.quick else name)
    machine = machine_facts()
    with ExitStack() as stack:
        try:
            measure = _on_gpu(options, machine, stack) if device == "cuda" else _on_cpu(options, machine)
        except NotMeasured as failure:
            print(f"cannot measure on {device}: {failure}; --device cpu measures here", file=sys.stderr)
            return 2
        records = measure_all(cases, measure, stem.with_suffix(".jsonl"))
    status = _show(console, records, stem)
    console.print(f"written: {stem}.jsonl", soft_wrap=True)
    return status


def _choose(options: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the device and its suites; a suite that only one device has decides where to measure."""
    homes = [device for device, suites in SUITES.items() if options.suite in suites]
    device = options.device or (homes[0] if len(homes) == 1 else default_device())
    if options.suite == "all":
        return device, list(SUITES[device])
    suite = options.suite or next(iter(SUITES[device]))
    if suite not in SUITES[device]:
        _parser().error(f"{device} has no suite {suite!r}, it has: {', '.join(SUITES[device])}")
    return device, [suite]


def _on_cpu(options: argparse.Namespace, machine: dict[str, Any]) -> Measure:
    plan = Plan(
        repeats=options.repeats or (3 if options.quick else 7),
        budget=2.0 if options.quick else 10.0,
        threads=options.threads,
    )
    return partial(measure_case, plan=plan, machine=machine)


def _on_gpu(options: argparse.Namespace, machine: dict[str, Any], stack: ExitStack) -> Measure:
    plan = GpuPlan(
        repeats=options.repeats or (3 if options.quick else 20),
        budget=0.5 if options.quick else 15.0,
        deadline=time.monotonic() + 60 * options.minutes if options.minutes else float("inf"),
    )
    measurement = stack.enter_context(GpuMeasurement("cuda", plan))
    machine |= measurement.facts | {"versions": {**machine["versions"], **measurement.facts["versions"]}}
    return partial(measurement.measure, machine=machine)


def _show(console: Console, records: Sequence[Record], stem: Path) -> int:
    """Print a report of every suite and write the pictures; 1 if a contender failed."""
    for suite in dict.fromkeys(record.case.suite for record in records):
        mine = [record for record in records if record.case.suite == suite]
        print_report(console, suite, mine, mine[0].machine)
    on_cpu = [record for record in records if record.case.device == "cpu"]
    on_gpu = [record for record in records if record.case.device != "cpu"]
    pictures: list[Path] = []
    if any(record.status == "measured" for record in on_cpu):
        pictures.append(stem.with_suffix(".png"))
        save_plot(on_cpu, on_cpu[0].machine, pictures[0])
    if on_gpu:
        pictures += save_plots(on_gpu, on_gpu[0].machine, stem)
    console.print(f"pictures: {', '.join(map(str, pictures)) or 'none'}", soft_wrap=True)
    return int(any(record.status == "failed" for record in records))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time, peak memory and errors of xent beside PyTorch, on a GPU beside peers and floors too.",
    )
    names = list(dict.fromkeys(name for suites in SUITES.values() for name in suites))
    parser.add_argument("--suite", choices=[*names, "all"], help="what to measure (default: the goals of the device)")
    parser.add_argument("--device", choices=list(DEVICES), help="where (default: the NVIDIA GPU, if there is one)")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats: does everything still run?")
    parser.add_argument("--full", action="store_true", help="also run contenders that take minutes at their size")
    parser.add_argument("--out", type=Path, default=_DEFAULT_OUT, help="folder of the results (default: %(default)s)")
    parser.add_argument("--threads", type=_positive, help="threads of each process (default: the framework's choice)")
    parser.add_argument("--repeats", type=_positive, help="pairs or rounds, if time allows (CPU: 7, GPU: 20, quick: 3)")
    parser.add_argument("--minutes", type=float, help="on a GPU: begin nothing new after so many (default: no end)")
    parser.add_argument("--show", type=Path, nargs="+", metavar="JSONL", help="measure nothing, show these results")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number
