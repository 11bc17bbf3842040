"""The distillation example for mlx-lm: the student approaches its teacher, with dense and quantized weights."""

import re
import subprocess
import sys

import pytest

from tests.packaging.tree import ROOT


@pytest.mark.parametrize("arguments", [[], ["--bits", "8", "--beta", "0.5"]])
def test_student_approaches_its_teacher(arguments: list[str]) -> None:
    command = [sys.executable, "examples/distill_mlx.py", "--steps", "50", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    (teacher,) = re.findall(r"^teacher: loss on text (.*)$", run.stdout, flags=re.MULTILINE)
    lines = re.findall(r"^step (\d+): from the teacher (.*), loss on text (.*)$", run.stdout, flags=re.MULTILINE)
    assert [int(step) for step, _, _ in lines] == [0, 50]
    apart, text = ([float(line[place]) for line in lines] for place in (1, 2))
    assert apart[0] > 2
    assert apart[-1] < 0.1 * apart[0]
    assert text[-1] < float(teacher) + 0.1 * text[0]
