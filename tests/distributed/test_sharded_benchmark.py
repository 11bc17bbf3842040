"""The benchmark of shards: its contenders compute the same loss and gradients, and a wrong one is detected."""

import gc
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases import SUITES, Case
from benchmarks.cli import main
from benchmarks.contenders import find_contender, textbook
from benchmarks.process import Absent, NotMeasured, Team
from benchmarks.ranks import Ranks, Shards
from benchmarks.records import load_records, write_records
from benchmarks.session import Session
from tests.distributed.pool import PROCESSES, Pool, device

pytestmark = pytest.mark.full("benchmarks/")

SMALL = SUITES["cpu"]["sharded"][0]
NAMES = SMALL.contenders
ALL_REDUCES = ("largest logits", "targets' logits", "sums", "gradient of the hidden states")


def _case(vocabulary: int = 250) -> Case:
    return replace(SMALL, tokens=98, hidden=16, vocabulary=vocabulary, ranks=PROCESSES, device=device().type)


def errors(case: Case, name: str) -> dict[str, float] | str:
    """Return a rank's errors, or the reason why the contender is absent."""
    shards = Shards(case)
    try:
        return shards.errors(shards.truth(), find_contender("sharded", name).make(case)(shards))
    except Absent as reason:
        return str(reason)


@pytest.mark.parametrize("case", [_case(248), _case(250), replace(_case(), teacher=16)], ids=str)
@pytest.mark.parametrize("name", NAMES[1:])
def test_contenders_compute_the_same(pool: Pool, name: str, case: Case) -> None:
    if case.teacher and name not in ("xent", "textbook"):
        return
    for found in pool.run(errors, case, name):
        if isinstance(found, str):
            pytest.skip(found)
        assert max(found.values()) < 1e-5


def floor(case: Case) -> list[bool]:
    """Run the floor. Return whether the leaves have no gradient."""
    shards = Shards(case)
    assert find_contender("sharded", NAMES[0]).make(case)(shards) is None
    return [leaf.grad is None for leaf in (shards.input, shards.weight)]


def test_the_floor_runs(pool: Pool) -> None:
    assert pool.run(floor, _case()) == [[True, True]] * PROCESSES


def prepared(case: Case, skipped: int | None) -> str:
    """Prepare the textbook's loss with one all-reduce skipped. Return the error message."""
    calls = count()

    def all_reduce(values: Tensor, *arguments: Any, **keywords: Any) -> None:
        if next(calls) % len(ALL_REDUCES) != skipped:
            dist.all_reduce(values, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(textbook, "dist", SimpleNamespace(all_reduce=all_reduce, ReduceOp=dist.ReduceOp))
        return _judged(case, "textbook")


def _judged(case: Case, name: str) -> str:
    session = Session(case.device)
    session._devices[case.device] = Ranks(case.device, case.ranks, dist.get_rank(), "")
    session.open(case)
    try:
        session.prepare(name)
    except NotMeasured as reason:
        return str(reason)
    finally:
        gc.unfreeze()
    return "nothing"


@pytest.mark.parametrize("skipped", [None, *range(len(ALL_REDUCES))], ids=["none", *ALL_REDUCES])
def test_skipped_all_reduce_is_detected(pool: Pool, skipped: int | None) -> None:
    for said in pool.run(prepared, _case(), skipped):
        assert (said == "nothing") == (skipped is None)
        assert said.startswith("input gradient error") or skipped != 3


def test_two_processes_are_measured_and_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--gpus", "2", "--only", "64x16x96", "--repeats", "2", "--out", str(tmp_path)]
    assert main(arguments) == 0
    out = tmp_path / "cpu-sharded-2-part.jsonl"
    records = {record.contender: record for record in load_records(out)}
    assert tuple(records) == NAMES
    assert {record.case.title for record in records.values()} == {"sharded 64x16x96 float32, over 2 ranks"}
    for name, record in records.items():
        if name.startswith("Liger"):
            assert record.status == "absent"
            continue
        assert record.status == "measured"
        assert record.machine["ranks"] == 2
        assert len(record.loop) == len(record.seconds) >= 2
        if name != NAMES[0]:
            assert record.quantity("loop")
            assert max(record.loss_error, record.input_gradient_error, record.weight_gradient_error) < 1e-5
    assert "loss_parallel" in capsys.readouterr().out
    four = tmp_path / "four.jsonl"
    as_if = [replace(record, case=replace(record.case, ranks=4)) for record in records.values()]
    four.write_text("".join(write_records(as_if)), encoding="utf-8")
    assert main(["--show", str(out), str(four), "--out", str(tmp_path / "both")]) == 0
    assert (tmp_path / "both" / f"{out.stem}-ranks.png").stat().st_size > 10_000


def test_failing_rank_ends_all_processes(tmp_path: Path) -> None:
    with Team(Session, [("cpu", 2, rank, str(tmp_path / "meeting")) for rank in range(2)]) as processes:
        assert processes.ask("open", SMALL, seconds=60) == {}
        with pytest.raises(NotMeasured, match=r"(?i)liger") as absent:
            processes.ask("prepare", "Liger", seconds=60)
        assert absent.value.status == "absent"
        assert processes.runs
        with pytest.raises(NotMeasured, match="KeyError"):
            processes.ask("turn", "not prepared", 1, 1, seconds=60)
        assert not processes.runs


def test_too_few_gpus_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda", "--gpus", str(torch.cuda.device_count() + 2), "--out", str(tmp_path)]) == 2
    assert "want a GPU each" in capsys.readouterr().err
