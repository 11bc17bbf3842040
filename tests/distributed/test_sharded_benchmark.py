"""The benchmark of shards: its contenders compute the same loss and gradients, and a wrong one is detected."""

import gc
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases import SUITES, Case
from benchmarks.cli import main
from benchmarks.contenders import find_contender, textbook
from benchmarks.process import Absent, NotMeasured, Team
from benchmarks.ranks import Ranks, Shards
from benchmarks.records import Record, load_records, write_records
from benchmarks.session import Session
from tests.distributed.pool import PROCESSES, Pool, device
from tests.distributed.test_faults import FAULTS

SMALL = SUITES["cpu"]["sharded"][0]
NAMES = SMALL.contenders
ALL_REDUCES = ("largest logits", "targets' logits", "sums", "gradient of the hidden states")


def _case(vocabulary: int = 250) -> Case:
    return replace(SMALL, tokens=98, hidden=16, vocabulary=vocabulary, ranks=PROCESSES, device=device().type)


def step(case: Case, name: str) -> dict[str, Any] | str:
    """Return a rank's inputs and results in float64, or the reason why the contender is absent."""
    shards = Shards(case)
    try:
        loss = find_contender("sharded", name).make(case)(shards)
    except Absent as reason:
        return str(reason)
    gradient = shards.input.grad if shards.tokens.grad is None else shards.tokens.grad
    found = {"input": shards.input, "weight": shards.weight, "of_input": gradient, "of_weight": shards.weight.grad}
    numbers = {name: value.detach().double().cpu().numpy() for name, value in found.items() if value is not None}
    return numbers | {"target": shards.target.cpu().numpy(), "loss": float(loss), **shards.errors(shards.truth(), loss)}


@pytest.mark.parametrize("vocabulary", [248, 250])
@pytest.mark.parametrize("name", NAMES[1:])
def test_contenders_compute_the_same(pool: Pool, name: str, vocabulary: int) -> None:
    parts = pool.run(step, _case(vocabulary), name)
    if isinstance(parts[0], str):
        assert parts == [parts[0]] * PROCESSES
        pytest.skip(parts[0])
    hidden, target = parts[0]["input"], parts[0]["target"]
    weight = np.concatenate([part["weight"] for part in parts])
    assert weight.shape == (vocabulary, 16)
    logits = hidden @ weight.T
    exponentials = np.exp(logits)
    rows = np.arange(len(target))
    loss = np.mean(np.log(exponentials.sum(1)) - logits[rows, target])
    gradient = exponentials / exponentials.sum(1, keepdims=True)
    gradient[rows, target] -= 1
    gradient /= len(target)
    pieces = [part["of_input"] for part in parts]
    if name == "xent sequence parallel":
        pieces = [np.concatenate(pieces)]
    for part in parts:
        np.testing.assert_array_equal(part["input"], hidden)
        np.testing.assert_array_equal(part["target"], target)
        assert part["loss"] == pytest.approx(loss, rel=1e-6)
        assert max(part[key] for key in part if key.endswith("_error")) < 1e-5
    for piece in pieces:
        _assert_close(piece, gradient @ weight)
    _assert_close(np.concatenate([part["of_weight"] for part in parts]), gradient.T @ hidden)


def errors(case: Case, name: str) -> dict[str, float]:
    shards = Shards(case)
    return shards.errors(shards.truth(), find_contender("sharded", name).make(case)(shards))


@pytest.mark.parametrize("name", ["xent", "textbook"])
def test_divergences_equal_their_definition(pool: Pool, name: str) -> None:
    for found in pool.run(errors, replace(_case(), teacher=16), name):
        assert max(found.values()) < 1e-5


def _assert_close(found: Any, true: Any) -> None:
    assert np.linalg.norm(found - true) < 1e-5 * np.linalg.norm(true)


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


def with_fault(case: Case, name: str, fault: str) -> str:
    """Prepare one of xent's contenders with a fault. Return the error message."""
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault].plant(patch)
        return _judged(case, name)


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


@pytest.mark.parametrize(
    ("name", "fault", "wanted"),
    [
        ("xent", "sums, exponentials of rank 0 doubled", "loss error"),
        ("xent", "hidden states' gradient, not summed", "input gradient error"),
        ("xent", "hidden states' gradient, summed twice", "input gradient error"),
        ("xent sequence parallel", "gradient of tokens in shards, not summed", "input gradient error"),
    ],
)
def test_fault_in_xent_is_detected(pool: Pool, name: str, fault: str, wanted: str) -> None:
    for said in pool.run(with_fault, _case(9), name, fault):  # with more classes all sums are alike
        assert said.startswith(wanted)


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
        assert record.machine["process_group"] == "gloo"
        assert len(record.loop) == len(record.seconds) >= 2
        assert min(record.loop + record.seconds) > 0
        if name != NAMES[0]:
            assert record.peak_bytes is not None
            assert record.quantity("loop")
            assert (
                max(record.loss_error or 1, record.input_gradient_error or 1, record.weight_gradient_error or 1) < 1e-5
            )
    assert "loss_parallel" in capsys.readouterr().out
    four = tmp_path / "four.jsonl"
    four.write_text("".join(write_records(_as_if_on_four(records))), encoding="utf-8")
    assert main(["--show", str(out), str(four), "--out", str(tmp_path / "both")]) == 0
    both, alone = tmp_path / "both" / f"{out.stem}-ranks.png", tmp_path / f"{out.stem}-ranks.png"
    assert both.stat().st_size > alone.stat().st_size / 2


def _as_if_on_four(records: dict[str, Record]) -> list[Record]:
    return [replace(record, case=replace(record.case, ranks=4)) for record in records.values()]


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
