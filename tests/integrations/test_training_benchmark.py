"""The benchmark of training steps: its variants train alike, and leave the model as it was."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.cases import SUITES, quick
from benchmarks.cli import main
from benchmarks.contenders import find_contender
from benchmarks.process import Absent
from benchmarks.records import Record, load_records
from benchmarks.tables import make_tables
from benchmarks.training import TrainingProblem

pytestmark = pytest.mark.full("benchmarks/")

TINY = quick(SUITES["cpu"]["training"][0])
NAMES = TINY.contenders


def table(records: list[Record]) -> str:
    return next(make_tables(records)).markdown()


def test_variants_train_alike_and_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--suite", "training", "--quick", "--only", "checkpointing"]
    assert main([*arguments, "--repeats", "2", "--out", str(tmp_path)]) == 0
    lines = tmp_path / "cpu-training-quick.jsonl"
    records = {record.contender: record for record in load_records(lines)}
    assert tuple(records) == NAMES
    assert {name for name, record in records.items() if record.status == "measured"} >= {"plain", "xent"}
    for record in records.values():
        if record.status == "absent":
            assert record.contender in ("Liger", "CCE", "torch")
            continue
        assert record.status == "measured"
        assert len(record.seconds) == 2
        assert min(record.seconds) > 0
        assert record.loss == pytest.approx(records["plain"].loss, rel=1e-5)
        if record.peak_bytes is not None:  # no system but Linux measures every peak
            assert (record.longest or 0) > 64
            assert f"{record.longest} in 0.01 GiB" in table([record])
    shown = capsys.readouterr().out
    assert "ms per step" in shown
    assert (tmp_path / "cpu-training-quick-training.png").exists()


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma", "tiny-qwen"])
def test_variants_leave_the_model_as_it_was(model: str) -> None:
    problem = TrainingProblem(replace(TINY, model=model))
    before = dict(vars(problem.model)), type(problem.model.get_output_embeddings())
    tokens = torch.arange(3, 35)[None]
    wanted = problem.model(tokens, labels=tokens).loss.item()
    for name in NAMES:
        variant = find_contender("training", name).make(TINY)
        try:
            loss = problem.call(variant, (tokens, tokens))
        except Absent:
            continue
        assert loss.item() == pytest.approx(wanted, rel=1e-5)
        assert all(weight.grad is None for weight in problem.model.parameters())
    problem.call(find_contender("training", "plain").make(TINY), (tokens, tokens))
    assert (dict(vars(problem.model)), type(problem.model.get_output_embeddings())) == before
    assert problem.model.config._attn_implementation == "sdpa"
