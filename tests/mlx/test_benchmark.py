"""The benchmark for MLX runs, with small errors."""

from pathlib import Path

import pytest

from benchmarks.mlx import main
from benchmarks.records import load_records

pytestmark = pytest.mark.full("benchmarks/")


def test_quick_run_writes_a_line_for_each_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--repeats", "1", "--out", str(tmp_path / "lines.jsonl")]) == 0
    records = load_records(tmp_path / "lines.jsonl")
    names = ["unfused", "xent", "unfused, compiled", "xent, compiled"]
    assert [record.contender for record in records[:4]] == names
    assert all((record.peak_bytes or 0) > 0 and min(record.seconds) > 0 for record in records)
    wide = [record for record in records if record.case.dtype == "float32"]
    errors = [error for record in wide for error in (record.loss_error, record.weight_gradient_error)]
    assert all(error is not None and error < 1e-5 for error in errors)
    assert "xent, compiled" in capsys.readouterr().out
