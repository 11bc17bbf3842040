"""The DPO example for mlx-lm learns the preference, with full training and with a quantized model."""

import re
import subprocess
import sys

import pytest

from tests.packaging.tree import ROOT


@pytest.mark.parametrize(("arguments", "most"), [(["--steps", "21"], 0.3), (["--steps", "21", "--bits", "8"], 0.68)])
def test_example_learns_the_preference(arguments: list[str], most: float) -> None:
    command = [sys.executable, "examples/dpo_mlx.py", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    lines = re.findall(r"^step (\d+): loss (.*), pairs learned (.*)$", run.stdout, flags=re.MULTILINE)
    assert [int(step) for step, _, _ in lines] == [0, 20]
    losses, learned = ([float(line[place]) for line in lines] for place in (1, 2))
    assert losses[0] == pytest.approx(0.693, abs=1e-3)  # log 2, because the model still equals its reference
    assert losses[-1] < most
    assert learned[-1] > 0.9
