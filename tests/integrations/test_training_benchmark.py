"""The benchmark of a training step runs, and its two variants train alike."""

import json
from pathlib import Path

import pytest

from benchmarks.process import NotMeasured
from benchmarks.training import __main__ as training


def test_both_variants_train_and_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--model", "tiny", "--lengths", "32", "--steps", "1", "--rounds", "2"]
    assert training.main([*arguments, "--out", str(tmp_path)]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny | 32 |"))
    lines = (tmp_path / "training-cpu.jsonl").read_text(encoding="utf-8").splitlines()
    machine, plain, patched = map(json.loads, lines)
    assert machine["machine"]["versions"]["torch"]
    assert (plain["variant"], patched["variant"]) == ("plain", "patched")
    assert patched["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert len(plain["rounds"]) == len(patched["rounds"]) == 2
    assert min(plain["rounds"] + patched["rounds"]) > 0
    assert training.main(["--show", str(tmp_path / "training-cpu.jsonl")]) == 0
    assert row in capsys.readouterr().out


def test_a_variant_that_fails_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise NotMeasured("failed", "no memory")

    monkeypatch.setattr(training, "Process", refuse)
    assert training.main(["--device", "cpu", "--model", "tiny", "--out", str(tmp_path)]) == 1
    assert "failed: no memory" in capsys.readouterr().err
