"""The benchmark of training steps: its variants train alike, and a failure costs no more than its own row."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.process import NotMeasured
from benchmarks.protocol import OUT_OF_MEMORY, FirstStep, OpenTraining, PeakStep, Request, Steps
from benchmarks.training import __main__ as training
from benchmarks.training import measure as measuring
from benchmarks.training.measure import Deadline, NoTimeLeft, Plan, Trainer, measure
from benchmarks.training.models import SHAPES, make_model
from benchmarks.training.table import markdown
from benchmarks.training.variants import VARIANTS
from benchmarks.training.worker import Training

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
    table = markdown(results)
    assert table in capsys.readouterr().out
    assert training.main(["--show", str(tmp_path / "training-cpu.jsonl")]) == 0
    assert table in capsys.readouterr().out


def test_longest_sequence_fits_and_is_in_the_table(tmp_path: Path) -> None:
    arguments = ["--models", "tiny-llama", "--variants", "xent", "--checkpointing", "on"]
    (result,) = run(tmp_path, *arguments)
    if result["peak"] is None:  # no system but Linux measures every peak
        assert result["longest_reason"]
        return
    fitting = [trial for trial in result["trials"] if trial["peak"] <= SHAPES["tiny-llama"].limit * GIB]
    assert result["longest"] == max(trial["length"] for trial in fitting) > 64
    assert f"{result['longest']} in 0.01 GiB" in markdown([result])


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


def test_failed_step_is_a_reply_and_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def failing(model: Any) -> Iterator[Any]:
        def loss_of(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            model(tokens, labels=labels).loss.backward()
            raise failures.pop()

        yield loss_of

    failures = [ValueError("line\nanother"), torch.OutOfMemoryError("much text")]

    monkeypatch.setitem(VARIANTS, "plain", failing)  # type: ignore[arg-type]
    worker = Training()
    assert worker.answer(OpenTraining("tiny-llama", "cpu", "float32", False))["held_bytes"] > 0
    for reply in ({"skipped": OUT_OF_MEMORY}, {"error": "ValueError: line"}):
        assert worker.answer(PeakStep("plain", 32)) == reply
        assert all(weight.grad is None for weight in worker._network.parameters())
    assert worker.answer(Steps("xent", 32, 1))["seconds"] > 0


class FakeTrainer(Trainer):
    """Answers without a process. `fails` are the failures by variant and length."""

    def __init__(self, fails: dict[tuple[str, int], Exception]) -> None:
        super().__init__(Deadline(None), 1.0)
        self.fails = fails
        self.asked: list[Request] = []

    def ask(self, request: Request) -> dict[str, Any]:
        self.asked.append(request)
        if isinstance(request, OpenTraining):
            return {}
        assert isinstance(request, FirstStep | PeakStep | Steps)
        if failure := self.fails.get((request.variant, request.length)):
            raise failure
        if isinstance(request, FirstStep):
            return {"loss": 1.0}
        slope = {"plain": 2, "xent": 1, "torch": 1}[request.variant] * GIB / 1000
        return {"seconds": request.length / 1e5} | (
            {"peak": 5 * GIB + slope * request.length} if isinstance(request, PeakStep) else {}
        )


def measure_with(fails: dict[tuple[str, int], Exception]) -> list[dict[str, Any]]:
    model = OpenTraining("tiny-llama", "cpu", "float32", True)
    plan = Plan(model, ("plain", "xent", "torch"), 8192, 1, 3, 30.0, 256, 10.0)
    results = plan.results()
    measure(FakeTrainer(fails), plan, results, lambda: None)
    return results


def test_longest_sequence_of_each_variant() -> None:
    plain, xent, torchs = measure_with({})
    assert (plain["longest"], xent["longest"], torchs["longest"]) == (12288, 24832, 24832)
    assert not plain["at_least"]
    assert [trial["length"] for trial in xent["trials"]] == [8192, 12288, 24832]
    assert [trial["length"] for trial in torchs["trials"]] == [8192, 24832]
    assert plain["rounds"] == [0.08192] * 3


def test_too_little_memory_for_the_tokens_still_has_a_longest_sequence() -> None:
    plain, xent, _ = measure_with({("plain", 8192): NotMeasured("skipped", OUT_OF_MEMORY)})
    assert (plain["status"], plain["reason"]) == ("skipped", "out of memory")
    assert 4096 <= plain["longest"] < 8192
    assert xent["status"] == "measured"
    row = markdown([plain, xent]).splitlines()[2]
    assert "| skipped: out of memory |" in row
    assert f"{plain['longest']} in 30 GiB" in row


def test_variant_that_fails_has_a_reason_and_no_longest_sequence() -> None:
    plain, xent, _ = measure_with({("xent", 8192): NotMeasured("failed", "ValueError: broken")})
    assert (xent["status"], xent["reason"]) == ("failed", "ValueError: broken")
    assert "longest" not in xent
    assert plain["status"] == "measured"


def test_failure_in_the_search_keeps_the_measurement() -> None:
    _, xent, _ = measure_with({("xent", 12288): NotMeasured("failed", "broken")})
    assert xent["status"] == "measured"
    assert (xent["longest"], xent["at_least"], xent["longest_reason"]) == (8192, True, "broken")


def test_process_that_ends_is_replaced_with_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Request]] = []

    class FakeProcess:
        def __init__(self, *arguments: object) -> None:
            self.runs = True
            asked.append([])

        def __enter__(self) -> "FakeProcess":
            return self

        def __exit__(self, *arguments: object) -> None:
            pass

        def ask(self, request: Request, seconds: float | None = None) -> dict[str, Any]:
            asked[-1].append(request)
            if isinstance(request, Steps):
                self.runs = False
                raise NotMeasured("failed", "the process ended")
            return {}

    monkeypatch.setattr(measuring, "Process", FakeProcess)
    model = OpenTraining("tiny-llama", "cpu", "float32", True)
    with Trainer(Deadline(None), 1.0) as trainer:
        trainer.open(model)
        with pytest.raises(NotMeasured, match="ended"):
            trainer.ask(Steps("CCE", 8, 1))
        trainer.ask(PeakStep("xent", 8))
    assert asked == [[model, Steps("CCE", 8, 1)], [model, PeakStep("xent", 8)]]


def test_nothing_is_asked_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeProcess:
        runs = True

        def __init__(self, *arguments: object) -> None:
            pass

        def __enter__(self) -> "FakeProcess":
            return self

        def __exit__(self, *arguments: object) -> None:
            pass

    monkeypatch.setattr(measuring, "Process", FakeProcess)
    with Trainer(Deadline(0), 1.0) as trainer, pytest.raises(NoTimeLeft):
        trainer.ask(PeakStep("xent", 8))
