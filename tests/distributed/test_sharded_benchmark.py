"""The benchmark of shards: its contenders compute the same loss and gradients, and a run is measured and plotted."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cases import SUITES, Case
from benchmarks.cli import main
from benchmarks.contenders import find_contender
from benchmarks.process import Absent
from benchmarks.ranks import Shards
from benchmarks.records import load_records, write_records
from tests.distributed.pool import PROCESSES, Pool, device

pytestmark = pytest.mark.full("benchmarks/")

SMALL = SUITES["cpu"]["sharded"][0]
NAMES = SMALL.contenders


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
