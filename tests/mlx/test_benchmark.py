"""The benchmark for MLX runs, and detects a wrong gradient."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

import xent
from benchmarks.mlx import main


def test_quick_run_writes_a_line_for_each_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--repeats", "1", "--out", str(tmp_path / "lines.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["contender"] for line in lines[:4]] == ["unfused", "xent", "unfused, compiled", "xent, compiled"]
    assert all(line["peak_mib"] > 0 and min(line["seconds"]) > 0 for line in lines)
    assert max(max(line["errors"]) for line in lines if line["case"]["dtype"] == "float32") < 1e-5
    assert "xent, compiled" in capsys.readouterr().out


def test_memory_limit_is_set_during_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    right = mx.set_memory_limit
    monkeypatch.setattr(mx, "set_memory_limit", lambda limit: seen.append(limit) or right(limit))
    before = right(2**40)
    right(before)
    main(["--quick", "--repeats", "1", "--limit", "1"])
    assert [limit == before for limit in seen] == [False, True] * 2


def test_wrong_gradient_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = xent.linear_cross_entropy

    def wrong(x: mx.array, w: mx.array, y: mx.array, **options: object) -> mx.array:
        return right(x, mx.stop_gradient(w) + 0.9 * (w - mx.stop_gradient(w)), y, **options)

    monkeypatch.setattr(xent, "linear_cross_entropy", wrong)
    main(["--quick", "--repeats", "1", "--out", str(tmp_path / "lines.jsonl")])
    line = json.loads((tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines()[1])
    assert line["errors"][2] > 0.09
