"""Short runs of examples: what they train gets better, their plots are written, and equal computations agree."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from runpy import run_path

import pytest
import torch

from demo import text
from tests.packaging.tree import ROOT

pytestmark = pytest.mark.full("examples/", "demo/")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Run an example as a script, and return what it prints."""

    def ran(command: str) -> str:
        name, *options = command.split()
        for folder in (ROOT, ROOT / "examples"):
            monkeypatch.syspath_prepend(folder)
        monkeypatch.setattr(sys, "argv", [name, *options])
        monkeypatch.setattr(text, "LARGEST_CORPUS", 120_000)
        torch.manual_seed(0)
        run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return ran


@pytest.fixture
def plot(tmp_path: Path) -> Path:
    return tmp_path / "plot.png"


def steps_of(printed: str) -> dict[str, list[float]]:
    """Return the numbers after each word."""
    steps: dict[str, list[float]] = {}
    for word, number in re.findall(r"(\w+) (-?\d+\.\d+)", printed):
        steps.setdefault(word, []).append(float(number))
    return steps


def test_grpo(run: Callable[[str], str], plot: Path) -> None:
    steps = steps_of(run(f"grpo.py --steps 41 --plot {plot}"))
    assert steps["reward"][-1] > steps["reward"][0] + 0.2
    assert steps["entropy"][-1] < steps["entropy"][0]
    assert plot.stat().st_size > 10_000


def test_dpo(run: Callable[[str], str], plot: Path) -> None:
    steps = steps_of(run(f"dpo.py --first-steps 100 --steps 21 --plot {plot}"))
    assert steps["loss"][-2] == pytest.approx(0.693, abs=1e-3)  # the model is its own reference
    assert steps["loss"][-1] < 0.6
    assert steps["rising"][-1] > steps["rising"][0] + 0.1
    assert steps["falling"][-1] < steps["falling"][0]
    assert plot.stat().st_size > 10_000


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch.compile begins with an empty one
def test_small_model(run: Callable[[str], str]) -> None:
    losses = steps_of(run("small_model.py --layers 1 --width 32 --vocabulary 500 --tokens 64"))["loss"]
    assert 4 <= len(losses) <= 6
    assert max(losses) - 0.03 < min(losses) < 6.2


TEXT = "--batch 4 --context 24 --vocabulary 400"


def test_distillation(run: Callable[[str], str], plot: Path) -> None:
    """Students approach their teacher, also from hidden states."""
    printed = run(f"distill.py --steps 30 {TEXT} --width 48 --classes 128 --plot {plot}")
    rows = {name: float(value) for name, value in re.findall(r"^(\S.*?\S)  +(\d+\.\d+) ", printed, re.MULTILINE)}
    assert list(rows) == ["(the teacher itself)", "text alone", "hidden states", "stored top 128", "logits, unfused"]
    assert rows["hidden states"] == pytest.approx(rows["logits, unfused"], abs=2e-3)
    assert max(rows["hidden states"], rows["stored top 128"]) < rows["text alone"]
    assert "MiB stored" in printed
    assert plot.stat().st_size > 1000


def test_drafts(run: Callable[[str], str], plot: Path) -> None:
    """Training raises the acceptance rate, whichever divergence it minimises."""
    printed = run(f"draft.py --steps 60 {TEXT} --classes 200 --width 32 --draft-width 16 --plot {plot}")
    rates = re.findall(r"^(\S.*?\S)  +(\d+\.\d)% +(\d+\.\d)% ", printed, re.MULTILINE)
    assert [name for name, _, _ in rates] == ["KL", "total variation", "KL, then total variation"]
    for name, before, after in rates:
        assert float(after) > float(before) + 5, name
    assert plot.stat().st_size > 1000
