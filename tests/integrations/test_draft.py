"""A short run of the draft example: training raises the acceptance rate, whichever divergence it minimises."""

import re
import sys
from pathlib import Path

import pytest

from tests.packaging.tree import ROOT


def test_drafts_of_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from demo import text
    from examples import draft

    monkeypatch.setattr(text, "LARGEST_CORPUS", 120_000)
    plot = tmp_path / "draft.png"
    sizes = ["--steps", "60", "--batch", "4", "--context", "24", "--vocabulary", "400", "--classes", "200"]
    monkeypatch.setattr(sys, "argv", ["draft", *sizes, "--width", "32", "--draft-width", "16", "--plot", str(plot)])
    draft.main()
    printed = capsys.readouterr().out
    print(printed)
    found = re.findall(r"^(\S.*?\S)  +(\d+\.\d)% +(\d+\.\d)% ", printed, re.MULTILINE)
    assert [name for name, _, _ in found] == list(draft.WAYS)
    for name, before, after in found:
        assert float(after) > float(before) + 5, name
    assert plot.stat().st_size > 1000
