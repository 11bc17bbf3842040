"""The benchmark of training steps: its variants train alike, and a failure costs no more than its own row."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.process import NotMeasured, Team
from benchmarks.tables import training_table
from benchmarks.training import __main__ as training
from benchmarks.training.measure import NoTimeLeft, Trainer, measure, start_results
from benchmarks.training.variants import VARIANTS
from benchmarks.training.worker import MODELS, Training, make_model

GIB = 2**30


def run(out: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the command on the CPU, and return the results."""
    training.main(["--device", "cpu", "--rounds", "2", "--out", str(out), *arguments])
    lines = (out / "training-cpu.jsonl").read_text(encoding="utf-8").splitlines()
    machine, *results = map(json.loads, lines)
    assert machine["machine"]["versions"]["torch"]
    return results


def test_variants_train_alike_and_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--models", "tiny-llama", "tiny-gemma", "--limit", "0"]
    results = run(tmp_path, *arguments)
    assert [(each["checkpointing"], each["model"]) for each in results[:: len(VARIANTS)]] == [
        (checkpointing, model) for checkpointing in (True, False) for model in ("tiny-llama", "tiny-gemma")
    ]
    losses: dict[Any, float] = {}
    for result in results:
        if result["variant"] in ("Liger", "CCE"):
            assert result["status"] == "absent"
        elif result["status"] != "absent":  # torch without a chunked linear_cross_entropy or softcap
            assert len(result["rounds"]) == 2
            assert min(result["rounds"]) > 0
            assert result["loss"] == pytest.approx(losses.setdefault(result["model"], result["loss"]), rel=1e-5)
    assert {each["variant"] for each in results if each["status"] == "measured"} >= {"plain", "xent"}
    table = training_table(results).markdown()
    assert table in capsys.readouterr().out
    assert training.main(["--show", str(tmp_path / "training-cpu.jsonl")]) == 0
    assert table in capsys.readouterr().out


def test_longest_sequence_fits_and_is_in_the_table(tmp_path: Path) -> None:
    arguments = ["--models", "tiny-llama", "--variants", "xent", "--checkpointing", "on"]
    (result,) = run(tmp_path, *arguments)
    if result["peak"] is None:  # no system but Linux measures every peak
        assert result["longest_reason"]
        return
    fitting = [trial for trial in result["trials"] if trial["peak"] <= MODELS["tiny-llama"]["limit"] * GIB]
    assert result["longest"] == max(trial["length"] for trial in fitting) > 64
    assert f"{result['longest']} in 0.01 GiB" in training_table([result]).markdown()


def test_no_time_leaves_rows_that_say_so(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--quick", "--minutes", "0", "--out", str(tmp_path)]
    assert training.main(arguments) == 1
    lines = (tmp_path / "training-cpu.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    assert len(lines) == 2 * 3 * len(VARIANTS)
    assert {json.loads(line)["reason"] for line in lines} == {"no time left"}


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma", "tiny-qwen"])
@pytest.mark.parametrize("variant", ["plain", "xent"])
def test_a_variant_leaves_the_model_as_it_was(name: str, variant: str) -> None:
    model = make_model(name, "cpu", "float32", checkpointing=True)
    before = dict(vars(model)), type(model.get_output_embeddings())
    tokens = torch.arange(3, 35)[None]
    with VARIANTS[variant](model) as loss_of:
        loss = loss_of(tokens, tokens)
    assert (dict(vars(model)), type(model.get_output_embeddings())) == before
    assert model.config._attn_implementation == "sdpa"
    assert loss.item() == pytest.approx(model(tokens, labels=tokens).loss.item(), rel=1e-5)


def test_failed_step_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def failing(model: Any) -> Iterator[Any]:
        def loss_of(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            model(tokens, labels=labels).loss.backward()
            raise failures.pop()

        yield loss_of

    monkeypatch.setitem(VARIANTS, "plain", failing)  # type: ignore[arg-type]
    worker = Training("cpu")
    assert worker.open("tiny-llama", "float32", False)["held_bytes"] > 0
    failures = [ValueError("broken")]
    with pytest.raises(ValueError, match="broken"):
        worker.peak("plain", 32)
    worker.recover()
    assert all(weight.grad is None for weight in worker.network.parameters())
    assert worker.steps("xent", 32, 1)["seconds"] > 0


class Failing:
    """An object in a process, whose one method fails, at first in a way after which the device still works."""

    def __init__(self, usable: bool) -> None:
        self.usable = usable

    def call(self) -> None:
        raise (torch.OutOfMemoryError if self.usable else ValueError)("line\nanother")

    def recover(self) -> None:
        if not self.usable:
            raise RuntimeError


@pytest.mark.parametrize(
    ("usable", "status", "reason"), [(True, "skipped", "out of memory"), (False, "failed", "ValueError: line")]
)
def test_failure_is_a_reply_and_a_lost_device_ends_the_process(usable: bool, status: str, reason: str) -> None:
    with Team(Failing, [(usable,)]) as process:
        with pytest.raises(NotMeasured, match=reason) as failure:
            process.ask("call", seconds=60)
        assert (failure.value.status, process.runs) == (status, usable)


class FakeProcess:
    """Answers without a process. `fails` are the failures by method, variant and length; "ended" ends it."""

    asked: list[list[tuple[object, ...]]]
    fails: dict[tuple[object, ...], NotMeasured]

    def __init__(self, *arguments: object) -> None:
        self.runs = True
        self.asked.append([])

    def end(self) -> None:
        self.runs = False

    def ask(self, *request: Any, seconds: float | None = None) -> dict[str, Any]:
        self.asked[-1].append(request)
        method, variant, length = request[:3]
        if failure := self.fails.get((variant, length)):
            self.runs = str(failure) != "ended"
            raise failure
        if method in ("open", "loss"):
            return {"loss": 1.0}
        slope = {"plain": 2, "xent": 1, "torch": 1}[variant] * GIB / 1000
        return {"seconds": length / 1e5, "peak": 5 * GIB + slope * length}


def measure_with(fails: dict[tuple[object, ...], NotMeasured], minutes: float | None = None) -> list[dict[str, Any]]:
    FakeProcess.asked, FakeProcess.fails = [], fails
    facts = {"model": "tiny-llama", "device": "cpu", "dtype": "float32", "checkpointing": True}
    results = start_results(("plain", "xent", "torch"), **facts, tokens=8192, limit=30.0)
    trainer = Trainer("cpu", minutes, 1.0, FakeProcess)
    measure(trainer, results, lambda: None, steps=1, rounds=3, multiple=256, most_seconds=10.0)
    return results


def test_longest_sequence_of_each_variant() -> None:
    plain, xent, torchs = measure_with({})
    assert (plain["longest"], xent["longest"], torchs["longest"]) == (12288, 24832, 24832)
    assert not plain["at_least"]
    assert [trial["length"] for trial in xent["trials"]] == [8192, 16384, 24832]
    assert plain["rounds"] == [0.08192] * 3


def test_too_little_memory_for_the_tokens_still_has_a_longest_sequence() -> None:
    plain, xent, _ = measure_with({("plain", 8192): NotMeasured("skipped", "out of memory")})
    assert (plain["status"], plain["reason"]) == ("skipped", "out of memory")
    assert 4096 <= plain["longest"] < 8192
    assert xent["status"] == "measured"
    row = training_table([plain, xent]).markdown().splitlines()[2]
    assert "| skipped: out of memory |" in row
    assert f"{plain['longest']} in 30 GiB" in row


def test_variant_that_fails_has_a_reason_and_no_longest_sequence() -> None:
    plain, xent, _ = measure_with({("xent", 8192): NotMeasured("failed", "ValueError: broken")})
    assert (xent["status"], xent["reason"]) == ("failed", "ValueError: broken")
    assert "longest" not in xent
    assert plain["status"] == "measured"


def test_failure_in_the_search_keeps_the_measurement() -> None:
    _, xent, _ = measure_with({("xent", 16384): NotMeasured("failed", "broken")})
    assert xent["status"] == "measured"
    assert (xent["longest"], xent["at_least"], xent["longest_reason"]) == (8192, True, "broken")


def test_process_that_ends_is_replaced_with_the_same_model() -> None:
    _, xent, torchs = measure_with({("xent", 8192): NotMeasured("failed", "ended")})
    model = ("open", "tiny-llama", "float32", True)
    assert FakeProcess.asked == [[model, *FakeProcess.asked[0][1:]], [model, *FakeProcess.asked[1][1:]]]
    assert (xent["reason"], torchs["status"]) == ("ended", "measured")


def test_nothing_is_asked_after_the_deadline() -> None:
    with pytest.raises(NoTimeLeft):
        measure_with({}, minutes=0)
    assert FakeProcess.asked == [[]]
