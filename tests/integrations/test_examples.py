"""Short runs of examples: the reward rises and a plot is written; all ways of a small model's step agree."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.tree import ROOT

Found = dict[str, list[float]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Found]:
    """Run an example as a script, and return the numbers after each word that it prints."""

    def ran(command: str) -> Found:
        name, *options = command.split()
        monkeypatch.syspath_prepend(ROOT / "examples")
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        found: Found = {}
        for word, number in re.findall(r"(\w+) (-?\d+\.\d+)", capsys.readouterr().out):
            found.setdefault(word, []).append(float(number))
        return found

    return ran


def test_grpo(tmp_path: Path, run: Callable[[str], Found]) -> None:
    plot = tmp_path / "plot.png"
    steps = run(f"grpo.py --steps 41 --plot {plot}")
    assert steps["reward"][-1] > steps["reward"][0] + 0.2
    assert steps["entropy"][-1] < steps["entropy"][0]
    assert plot.stat().st_size > 10_000


def test_dpo(tmp_path: Path, run: Callable[[str], Found]) -> None:
    plot = tmp_path / "plot.png"
    steps = run(f"dpo.py --first-steps 100 --steps 21 --plot {plot}")
    assert steps["loss"][-2] == pytest.approx(0.693, abs=1e-3)  # the model is its own reference
    assert steps["loss"][-1] < 0.6
    assert steps["rising"][-1] > steps["rising"][0] + 0.1
    assert steps["falling"][-1] < steps["falling"][0]
    assert plot.stat().st_size > 10_000


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch.compile begins with an empty one
def test_small_model(run: Callable[[str], Found]) -> None:
    losses = run("small_model.py --layers 1 --width 32 --vocabulary 500 --tokens 64")["loss"]
    assert 4 <= len(losses) <= 6
    assert max(losses) - 0.03 < min(losses) < 6.2
