"""The examples for mlx-lm learn, with a quantized model, and in `nox -s full` with a dense one."""

import re
import subprocess
import sys

import pytest

from tests.covering import FULL
from tests.packaging.tree import ROOT


def lines_of(file: str, arguments: list[str], pattern: str) -> list[list[float]]:
    """Run an example. Return the numbers of each line of its output that matches the pattern."""
    command = [sys.executable, f"examples/{file}", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return [[float(number) for number in line] for line in re.findall(pattern, run.stdout, flags=re.MULTILINE)]


@pytest.mark.parametrize(("arguments", "most"), [(["--bits", "8"], 0.68), ([], 0.3)][: 1 + FULL])
def test_dpo_learns_the_preference(arguments: list[str], most: float) -> None:
    pattern = r"^step (\d+): loss (.*), pairs learned (.*)$"
    steps, losses, learned = zip(*lines_of("dpo_mlx.py", ["--steps", "21", *arguments], pattern), strict=True)
    assert steps == (0, 20)
    assert losses[0] == pytest.approx(0.693, abs=1e-3)  # log 2, because the model still equals its reference
    assert losses[-1] < most
    assert learned[-1] > 0.9


@pytest.mark.parametrize("arguments", [["--bits", "8", "--beta", "0.5"], []][: 1 + FULL])
def test_student_approaches_its_teacher(arguments: list[str]) -> None:
    pattern = r"^step (\d+): from the teacher (.*), loss on text (.*)$"
    steps, apart, text = zip(*lines_of("distill_mlx.py", ["--steps", "50", *arguments], pattern), strict=True)
    assert steps == (0, 50)
    assert apart[0] > 2
    assert apart[-1] < 0.1 * apart[0]
    assert text[-1] < 0.6 * text[0]
