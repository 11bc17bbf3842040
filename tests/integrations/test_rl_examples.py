"""Short runs of the examples of reinforcement learning and preference tuning: the reward rises, a plot is written."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.packaging.tree import ROOT

EXAMPLES = ROOT / "examples"


def run(
    name: str, *options: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, float]]:
    """Run an example as a script and return the numbers of each step that it printed."""
    plot = folder / "plot.png"
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [name, *options, "--plot", str(plot)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert plot.stat().st_size > 10_000
    steps = re.findall(r"^step \d+: (.*)$", capsys.readouterr().out, flags=re.MULTILINE)
    return [{part.split()[0]: float(part.split()[1]) for part in line.split(", ")} for line in steps]


def test_grpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    steps = run("grpo.py", "--steps", "41", folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2
    assert steps[-1]["entropy"] < steps[0]["entropy"]


def test_dpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--first-steps", "100", "--steps", "21"]
    steps = run("dpo.py", *options, folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert steps[0]["loss"] == pytest.approx(0.693, abs=1e-3)  # the model is its own reference
    assert steps[-1]["loss"] < 0.6
    assert steps[-1]["rising"] > steps[0]["rising"] + 0.1
    assert steps[-1]["falling"] < steps[0]["falling"]
