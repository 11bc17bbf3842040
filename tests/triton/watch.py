"""Run two programs under NVIDIA's compute-sanitizer, and fail if the tool reports an error.

`tests.triton.sanitize` has targets out of range, `xent check` launches every kernel.

    python -m tests.triton.watch memcheck
    python -m tests.triton.watch racecheck

Two kinds of reports of racecheck are ignored. One is of races inside the kernels of PyTorch and cuBLAS. The other comes
from `warp_specialize`: racecheck does not recognise how Triton's compiler passes its arguments between warps. Both
places of such a report are instructions that the compiler generated at the beginning of the kernel and around that
statement, not lines of the source.
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
    """Return 0 if both programs succeeded and the tool reported nothing unexplained."""
    errors = []
    for program in (["tests.triton.sanitize", *vocabularies], ["xent", "check", "triton"]):
        command = ["compute-sanitizer", "--tool", tool, sys.executable, "-m", *program]
        print("$", *command, flush=True)
        done = subprocess.run(
            command,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        found = unexplained(done.stdout.splitlines())
        if done.returncode:
            found.append(f"{done.stdout[-3000:]}\nthe program failed")
        print(*found, f"{tool}: {len(found)} errors", sep="\n")
        errors += found
    return int(bool(errors))


def unexplained(lines: list[str]) -> list[str]:
    """Return the reports that are not ignored; each as its first line and the following places."""
    reports = []
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
    """Return whether a race has no place in our kernels, or only places that the compiler generated."""
    if not report[0].startswith("Error: Race reported"):
        return False
    places = [line.partition(" access at ")[2] for line in report if " access at " in line]
    ours = [place for place in places if re.match(r"\w+\+0x", place) and place.partition("+")[0] in _kernels()]
    found = [re.search(r" in (\S+):(\d+)", place) for place in ours]
    return all(match is not None and _is_compilers_line(match.groups()) for match in found)


@cache
def _kernels() -> set[str]:
    """Return the names of all functions in the kernels' files."""
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
