"""The clocks and the truth of the benchmarks, tested on the CPU."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import documents
from benchmarks.cases import SUITES, Case, quick
from benchmarks.cli import main
from benchmarks.clock import device_seconds, host_seconds, loop_seconds
from benchmarks.contenders import find_contender
from benchmarks.problems import LinearProblem, LogitsProblem, make_problem
from benchmarks.records import Record, load_records, write_records
from benchmarks.session import Session
from benchmarks.truth import compute_truth

pytestmark = pytest.mark.full("benchmarks/")

TABLES = [[tuple(map(make, suite)) for suite in SUITES[each].values()] for each in SUITES for make in (replace, quick)]
SMALL = Case("test", "linear", 96, 16, 100, "float32", ("products", "xent"), accuracy=True)
CASES = [
    replace(SMALL, function=function, hidden=16 if function == "linear" else 0, **changes)
    for function in ("linear", "logits")
    for changes in ({}, {"reduction": "none"}, {"ignored": 0.6}, {"ignored": 0.6, "reduction": "none"})
] + [replace(SMALL, trained=("input",)), replace(SMALL, trained=("weight",))]


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_truth_equals_pytorch(case: Case) -> None:
    problem = make_problem(case)
    truth = compute_truth(problem)
    loss = problem.call(find_contender(case.function, "torch").make(case), problem.set_up())
    errors = truth.errors(problem, loss)
    wanted = ["weight_gradient_error"] * ("weight" in case.trained) if case.function == "linear" else []
    wanted += ["input_gradient_error"] * ("input" in case.trained)
    assert sorted(errors) == sorted(["loss_error", *wanted])
    assert max(errors.values()) < 1e-5


POST_TRAINING = [
    replace(SMALL, function="linear log-probabilities"),
    replace(SMALL, function="log-probabilities", hidden=0),
    *(replace(SMALL, function="linear divergence", teacher=24, options=(("beta", beta),)) for beta in (0.0, 0.4, 1.0)),
    replace(SMALL, function="linear divergence", options=(("top_k", 8),)),
]


@pytest.mark.parametrize("name", ["torch fp32 logits", "xent"])
@pytest.mark.parametrize("case", POST_TRAINING, ids=lambda case: case.title)
def test_truth_of_log_probabilities_and_divergences(case: Case, name: str) -> None:
    problem = make_problem(case)
    truth = compute_truth(problem)
    found = problem.call(find_contender(case.function, name).make(case), problem.set_up())
    errors = truth.errors(problem, found)
    assert sorted(errors) == ["input_gradient_error", "loss_error", *["weight_gradient_error"] * case.is_linear]
    assert max(errors.values()) < 1e-5
    assert truth.errors(problem, found.roll(1) if found.dim() else found + 1)["loss_error"] > 0.1


@pytest.mark.parametrize("wrong", [lambda x: -x, lambda x: 2 * x, torch.zeros_like, lambda x: x.roll(1, 0)])
@pytest.mark.parametrize("case", [SMALL, replace(SMALL, function="logits", hidden=0)], ids=lambda case: case.function)
def test_wrong_gradient_has_a_large_error(case: Case, wrong: Callable[[Tensor], Tensor]) -> None:
    problem = make_problem(case)
    problem.call(find_contender(case.function, "torch").make(case), problem.set_up())
    if isinstance(problem, LinearProblem):
        problem.weight.grad = wrong(problem.weight.grad)
    else:
        assert isinstance(problem, LogitsProblem)
        problem.received[0] = wrong(problem.received[0])
    assert max(compute_truth(problem).errors(problem, torch.zeros(())).values()) > 0.5


class Queue:
    """A simulated asynchronous device: `work` advances the exact clocks of host and device."""

    def __init__(self) -> None:
        self.host, self.busy_until = 0.0, 0.0

    def work(self, host: float, device: float) -> None:
        self.host += host
        self.busy_until = max(self.busy_until, self.host) + device

    def now(self) -> float:
        return self.host

    def wait(self) -> None:
        self.host = max(self.host, self.busy_until)

    def mark(self) -> float:
        return max(self.host, self.busy_until)

    def elapsed(self, start: float, end: float) -> float:
        return end - start

    def lead(self, seconds: float) -> None:
        self.work(0.0, seconds)

    def peak(self, call: Callable[[], None]) -> int | None:
        call()
        return None


@pytest.mark.parametrize(("host", "device"), [(2e-3, 5e-4), (1e-4, 3e-3)], ids=["host-bound", "device-bound"])
def test_clocks_separate_host_and_device(host: float, device: float) -> None:
    def call(*arguments: object) -> None:
        for _ in range(4):
            queue.work(host / 4, device / 4)

    queue = Queue()
    assert loop_seconds(queue, call, 50) == pytest.approx(max(host, device), rel=0.05)
    assert host_seconds(queue, call, 3) == pytest.approx(host)
    assert device_seconds(queue, call, lambda: None, 3, host) == pytest.approx(device)


@pytest.mark.parametrize("name", ["torch", "xent", "xent inplace"])
def test_an_iteration_of_a_loop_can_be_repeated(name: str) -> None:
    session = Session("cpu")
    session.open(replace(SMALL, function="logits", hidden=0, contenders=("copy", name)))
    assert session.prepare(name)["input_gradient_error"] < 1e-5
    assert session.turn(name, 3, 2)["seconds"] > 0
    session.prepared[name].call(session.prepared[name].set_up())
    assert session.truth is not None
    assert (
        session.truth.errors(session.problem, torch.zeros(()))["input_gradient_error"] < 1e-5
    )  # fresh logits, even if the call overwrote them


def small(case: Case) -> Case:
    tokens = 2 * case.batch or 32
    return replace(case, tokens=tokens, hidden=min(case.hidden, 16), vocabulary=200 + case.vocabulary % 2, device="cpu")


GPU_SUITES = [suite for suite in SUITES["cuda"].values() if suite[0].function not in ("sharded", "training")]
GPU_CASES = list(dict.fromkeys(small(quick(case)) for suite in GPU_SUITES for case in suite))


@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: f"{case.suite}: {case.title}")
def test_contenders_of_a_gpu_compute_the_same_loss(case: Case) -> None:
    problem = make_problem(case)
    names = [name for name in case.contenders if find_contender(case.function, name).kind == "ours"]
    losses = {}
    for name in (*names, "torch fp32 logits"):
        contender = find_contender(case.function, name)
        losses[name] = problem.call(contender.make(case), problem.set_up(contender.in_place)).float().mean()
    floor = find_contender(case.function, case.contenders[0])
    with torch.no_grad():
        floor.make(case)(*problem.set_up())
    expected = losses.pop("torch fp32 logits")
    assert all(torch.allclose(loss, expected, rtol=2e-2, atol=2e-2) for loss in losses.values())


@pytest.mark.parametrize("suite", [suite for table in TABLES[:4] for suite in table])
def test_suites_name_contenders_that_exist(suite: tuple[Case, ...]) -> None:
    for case in suite:
        assert all(find_contender(case.function, name).make for name in case.contenders)
        assert {name for name, _, _ in case.goals} <= set(case.contenders)


def test_cases_of_a_suite_have_different_titles_and_known_goals() -> None:
    for table in TABLES:
        for suite in table:
            assert len({(case.title, case.ranks) for case in suite}) == len(suite)
            for case in suite:
                record = Record(case, "xent", peak_bytes=2**30, base_peak_bytes=2**30, host=1.0, loss_error=0.1)
                record.judge_input_gradient_error = record.input_gradient_error = 0.1
                record.pairs = [(1.0, 1.0)]
                known = [record.quantity(name) for _, name, _ in case.goals]
                assert None not in known


def test_tables_of_a_document_are_filled_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, machine = replace(SMALL, device="cuda", contenders=("products", "xent")), {"commit": "abcdef0"}
    records = [
        Record(case, "products", loop=[2.0], seconds=[2.0], machine=machine),
        Record(case, "xent", loop=[3.0], seconds=[3.0], loop_pairs=[(2.0, 3.0)], machine=machine),
    ]
    (tmp_path / "gpu-test.jsonl").write_text("".join(write_records(records)))
    document = tmp_path / "text.md"
    document.write_text("before\n<!-- measured: test -->\nold\n<!-- end -->\nafter\n")

    def problems(fill: bool = False) -> list[str]:
        return list(documents.find_problems(document, tmp_path, fill=fill))

    assert problems() == ["text.md: the table 'test' differs; run python -m benchmarks.documents"]
    assert problems(fill=True) == problems() == []
    text = document.read_text()
    assert "| linear 96x16x100 float32 | products 2e+03 ms | xent 3e+03 ms |" in text
    assert "old" not in text
    document.write_text(text + "<!-- commit: abcdef0123 -->\n")
    assert problems() == []
    document.write_text(text + "<!-- commit: 1234567 -->\n")
    assert problems() == ["text.md: gpu-test.jsonl is of commit abcdef0, and the tables of 1234567"]


def test_the_command_measures_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--device", "cpu", "--suite", "host", "--quick", "--out", str(tmp_path)]
    assert main(command) == 0
    assert "Host time, microseconds per call" in capsys.readouterr().out
    lines = tmp_path / "cpu-host-quick.jsonl"
    before = lines.read_text()
    assert {record.contender for record in load_records(lines)} == {"torch", "xent"}
    assert main([*command, "--resume"]) == 0
    assert lines.read_text() == before
