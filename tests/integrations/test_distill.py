"""A short run of the distillation example: students approach their teacher, also from hidden states."""

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.packaging.tree import ROOT


def test_students_of_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from demo import text
    from examples import distill

    monkeypatch.setattr(text, "LARGEST_CORPUS", 120_000)
    plot = tmp_path / "distill.png"
    sizes = ["--steps", "30", "--batch", "4", "--context", "24", "--vocabulary", "400", "--width", "48"]
    monkeypatch.setattr(sys, "argv", ["distill", *sizes, "--classes", "128", "--plot", str(plot)])
    torch.manual_seed(0)
    distill.main()
    printed = capsys.readouterr().out
    found = {name: float(value) for name, value in re.findall(r"^(\S.*?\S)  +(\d+\.\d+) ", printed, re.MULTILINE)}
    assert list(found) == ["(the teacher itself)", "text alone", "hidden states", "stored top 128", "logits, unfused"]
    assert found["hidden states"] == pytest.approx(found["logits, unfused"], abs=2e-3)
    assert found["hidden states"] < found["text alone"]
    assert found["stored top 128"] < found["text alone"]
    assert "MiB stored" in printed
    assert plot.stat().st_size > 1000
