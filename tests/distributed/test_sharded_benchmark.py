"""The benchmark of shards: its contenders compute the same loss and gradients, and a wrong one is detected."""

import gc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.contenders import Absent, find_contender, textbook
from benchmarks.process import NotMeasured
from benchmarks.protocol import OpenCase, Prepare, Steps
from benchmarks.records import Record, load_records, write_records
from benchmarks.sharded import __main__ as sharded
from benchmarks.sharded import team
from benchmarks.sharded.cases import make_cases
from benchmarks.sharded.ranks import Together
from benchmarks.sharded.session import Session, Wrong
from benchmarks.sharded.shards import RankShards
from tests.distributed.pool import PROCESSES, Pool, device
from tests.distributed.test_faults import FAULTS

NAMES = make_cases("cpu", 2)[0].contenders
ALL_REDUCES = ("largest logits", "targets' logits", "sums", "gradient of the hidden states")


def _case(vocabulary: int = 250) -> Case:
    case = make_cases("cpu", PROCESSES, ((98, 16, vocabulary),))[0]
    return replace(case, device=device().type)


def step(case: Case, name: str) -> dict[str, Any] | str:
    """Return a rank's inputs and results in float64, or the reason why the contender is absent."""
    shards = RankShards(case)
    try:
        loss = find_contender("sharded", name).make(case)(shards)
    except Absent as reason:
        return str(reason)
    gradient = shards.input.grad if shards.tokens.grad is None else shards.tokens.grad
    found = {"input": shards.input, "weight": shards.weight, "of_input": gradient, "of_weight": shards.weight.grad}
    numbers = {name: value.detach().double().cpu().numpy() for name, value in found.items() if value is not None}
    return numbers | {"target": shards.target.cpu().numpy(), "loss": float(loss), **shards.errors(float(loss))}


@pytest.mark.parametrize("vocabulary", [248, 250])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("products + all-reduce", "overlapped")])
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


def _assert_close(found: Any, true: Any) -> None:
    assert np.linalg.norm(found - true) < 1e-5 * np.linalg.norm(true)


def floors(case: Case) -> list[float]:
    """Run both floors. Return the norms of gradients, of which there should be none."""
    shards = RankShards(case)
    for name in NAMES[:2]:
        assert find_contender("sharded", name).make(case)(shards) is None
    return [float(leaf.grad.norm()) for leaf in (shards.input, shards.weight) if leaf.grad is not None]


def test_floors_run(pool: Pool) -> None:
    assert pool.run(floors, _case()) == [[]] * PROCESSES


def prepared(case: Case, skipped: int | None) -> str:
    """Prepare the textbook's loss with one all-reduce skipped. Return the error message."""
    calls = 0

    def all_reduce(values: Tensor, *arguments: Any, **keywords: Any) -> None:
        nonlocal calls
        calls += 1
        if (calls - 1) % len(ALL_REDUCES) != skipped:
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
    try:
        Session(case, Together(case.device)).prepare(name)
    except Wrong as reason:
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
        ("xent", "sums, all those of rank 0", "loss error"),
        ("xent", "hidden states' gradient, not summed", "input gradient error"),
        ("xent", "hidden states' gradient, summed twice", "input gradient error"),
        ("xent sequence parallel", "gradient of tokens in shards, not summed", "input gradient error"),
    ],
)
def test_fault_in_xent_is_detected(pool: Pool, name: str, fault: str, wanted: str) -> None:
    for said in pool.run(with_fault, _case(), name, fault):
        assert said.startswith(wanted)


def test_two_processes_are_measured_and_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "two.jsonl"
    arguments = ["--device", "cpu", "--gpus", "2", "--sizes", "40x16x64", "--rounds", "2", "--seconds", "0.1"]
    assert sharded.main([*arguments, "--out", str(out)]) == 0
    records = {record.contender: record for record in load_records(out)}
    assert tuple(records) == NAMES
    assert {record.case.title for record in records.values()} == {"sharded 40x16x64 float32, over 2 ranks"}
    for name, record in records.items():
        if name.startswith("Liger"):
            assert record.status == "absent"
            continue
        assert record.status == "measured"
        assert record.machine["ranks"] == 2
        assert record.machine["process_group"] == "gloo"
        assert len(record.loop) == len(record.seconds) >= 2
        assert min(record.loop + record.seconds) > 0
        if name not in NAMES[:2]:
            assert record.peak_bytes is not None
            assert record.quantity("loop")
            assert (
                max(record.loss_error or 1, record.input_gradient_error or 1, record.weight_gradient_error or 1) < 1e-5
            )
    assert "loss_parallel" in capsys.readouterr().out
    four = tmp_path / "four.jsonl"
    four.write_text("".join(write_records(_as_if_on_four(records))), encoding="utf-8")
    assert sharded.main(["plot", str(out), str(four), "--out", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").stat().st_size > (tmp_path / "two.png").stat().st_size / 2


def _as_if_on_four(records: dict[str, Record]) -> list[Record]:
    return [replace(record, case=replace(record.case, ranks=4)) for record in records.values()]


def test_plot_without_results_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.jsonl").write_text("")
    assert sharded.main(["plot", str(tmp_path / "none.jsonl")]) == 1
    assert "nothing was measured" in capsys.readouterr().err


def test_only_full_sizes_on_gpus_have_goals() -> None:
    assert [len(case.goals) for ranks in (2, 4) for case in make_cases("cuda", ranks)] == [2, 2, 1, 0]
    assert not any(case.goals for case in make_cases("cpu", 2))
    assert not make_cases("cuda", 2, ((64, 4096, 128),))[0].goals
    assert make_cases("cuda", 4)[0].gradient_bytes == (8192 + 128256 // 4) * 4096 * 2


def test_failing_rank_ends_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_PATIENCE", 0.5)
    case = replace(make_cases("cpu", 2)[0], contenders=NAMES[:1])
    processes = team.Team("cpu", 2)
    try:
        assert processes.ask(OpenCase(case), 60) == {}
        with pytest.raises(NotMeasured, match=r"(?i)liger") as absent:
            processes.ask(Prepare("Liger"), 60)
        assert absent.value.status == "absent"
        assert processes.runs
        with pytest.raises(NotMeasured, match="rank 1: TypeError"):
            processes._ask([OpenCase(case), Steps("plain", 32, 1)], 60)
        assert not processes.runs
    finally:
        processes.__exit__(None, None, None)


def test_too_few_gpus_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = str(torch.cuda.device_count() + 1)
    assert sharded.main(["--device", "cuda", "--gpus", more, "--out", str(tmp_path / "none.jsonl")]) == 2
    assert "want a GPU each" in capsys.readouterr().err
