"""Runs `tests.triton.sanitize` under NVIDIA's compute-sanitizer and fails if the tool has something to report.

    python -m tests.triton.watch memcheck
    python -m tests.triton.watch racecheck

Two kinds of racecheck's reports are passed over. PyTorch's and cuBLAS's own kernels are not on trial. And racecheck
does not see how Triton's compiler hands the arguments of `warp_specialize` from warp to warp: both places of such a
report are what the compiler puts at the beginning of the kernel and around that statement, not a line that somebody
wrote.
"""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["main", "unexplained"]

KERNELS = Path(__file__).parents[2] / "src" / "backends" / "triton"
COMPILERS_OWN = ("def product_kernel(", "gl.warp_specialize(")


def main(tool: str, *vocabularies: str) -> int:
    """Return 0 if the program went well and nothing unexplained was reported."""
    program = [sys.executable, "-m", "tests.triton.sanitize", *vocabularies]
    print("$", "compute-sanitizer", "--tool", tool, *program, flush=True)
    done = subprocess.run(
        ["compute-sanitizer", "--tool", tool, *program],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    reports = done.stdout.count("Error: ")
    errors = unexplained(done.stdout.splitlines())
    print(*errors, sep="\n")
    if done.returncode or "calls came out right" not in done.stdout:
        print(done.stdout[-3000:])
        errors.append("the program failed")
    print(f"{tool}: {reports} reports, {len(errors)} of them unexplained")
    return 1 if errors else 0


def unexplained(lines: list[str]) -> list[str]:
    """Return what the tool reports, less what is passed over; each as its first line and the places that follow."""
    reports: list[list[str]] = []
    begun = False
    for line in (line.removeprefix("=========").strip() for line in lines if line.startswith("=========")):
        if line.startswith(("Error:", "Invalid", "Program hit", "Warning:")):
            reports.append([line])
            begun = True
        elif begun and line:
            reports[-1].append(line)
        else:
            begun = False
    return ["\n".join(report) for report in reports if not _is_passed_over(report)]


def _is_passed_over(report: list[str]) -> bool:
    """Whether a race has no place in a kernel of ours, or only places that are the compiler's."""
    if not report[0].startswith("Error: Race reported"):
        return False
    places = [line.partition(" access at ")[2] for line in report if " access at " in line]
    ours = [place for place in places if re.match(r"\w+\+0x", place) and place.partition("+")[0] in _kernels()]
    found = [re.search(r" in (\S+):(\d+)", place) for place in ours]
    return all(match is not None and _is_compilers_line(match.groups()) for match in found)


@cache
def _kernels() -> set[str]:
    """Return the names of the functions in the files of kernels."""
    return {name for file in KERNELS.rglob("*.py") for name in re.findall(r"def (\w+)\(", file.read_text("utf-8"))}


def _is_compilers_line(place: tuple[str | Any, ...]) -> bool:
    number = int(place[1])
    for source in KERNELS.rglob(Path(place[0]).name):
        lines = source.read_text(encoding="utf-8").splitlines()
        if number <= len(lines) and any(own in lines[number - 1] for own in COMPILERS_OWN):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
