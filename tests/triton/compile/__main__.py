"""Compile every kernel of `xent check triton --full` for GPUs that need not be there, and print what they use.

    python -m tests.triton.compile --each 4 --seed 1 --targets sm_80 gfx942
    python -m tests.triton.compile --all

Nothing runs: that a kernel compiles does not show that its results are right.
"""

import argparse
import os
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.triton.compile.build import TARGETS, Built, build
from tests.triton.compile.record import Launch, check_cases, hopper, record

__all__ = ["main", "some_of"]


def some_of(launches: Sequence[Launch], each: int | None, seed: int | None = None) -> list[Launch]:
    """Return up to `each` launches of every kernel, evenly spaced in the order of calls, or drawn; all if None."""
    kernels: dict[str, list[Launch]] = defaultdict(list)
    for launch in launches:
        kernels[launch.name].append(launch)
    chosen = []
    for same in kernels.values():
        count = len(same) if each is None else min(each, len(same))
        even = [same[at * len(same) // count] for at in range(count)]
        chosen += even if seed is None else random.Random(seed).sample(same, count)
    return chosen


def main(arguments: Sequence[str]) -> int:
    """Compile, print the table and the failures, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.triton.compile", description=__doc__)
    parser.add_argument("--each", type=int, default=8, help="the most signatures of a kernel (8)")
    parser.add_argument("--seed", type=int, help="draw the signatures, in place of evenly spaced ones")
    parser.add_argument("--all", action="store_true", help="all signatures, which takes hours on a few cores")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    launches, broken = record(check_cases(full=True))
    chosen = some_of(launches, None if options.all else options.each, options.seed)
    print(f"{len(launches)} signatures of {len({one.name for one in launches})} kernels; {len(chosen)} are compiled.")
    work = [(one, name) for one in chosen for name in options.targets if name == "sm_90" or not hopper(one)]
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        results = list(pool.map(build, *zip(*work, strict=True), chunksize=4))
    cells = defaultdict(list)
    reasons = defaultdict(int)
    for (launch, name), built in zip(work, results, strict=True):
        cells[launch.name + (" (Hopper only)" if hopper(launch) else ""), name].append(built)
        if built.failure is not None:
            reasons[launch.name, name, built.failure] += 1
    heading = ("kernel", "GPU", "signatures", "failed", "registers", "spilled bytes", "shared bytes")
    for row in (heading, *(_row(*key, builts) for key, builts in cells.items())):
        print("{:44} {:8} {:>10} {:>6} {:>9} {:>13} {:>12}".format(*row))
    for name in broken:
        print(f"NOT RECORDED {name}")
    for (kernel, name, failure), count in reasons.items():
        print(f"FAILED {kernel} for {name}, {count} signatures: {failure}")
    failed = sum(reasons.values())
    print(f"{len(work) - failed} of {len(work)} compiled and fit. Compiled, not run.")
    return 1 if failed or broken else 0


def _row(kernel: str, name: str, builts: Sequence[Built]) -> tuple[str, ...]:
    most = (max(getattr(one, field) for one in builts) for field in ("registers", "spilled", "shared"))
    return kernel, name, str(len(builts)), str(sum(one.failure is not None for one in builts)), *map(str, most)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
