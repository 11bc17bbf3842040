"""The clocks and the truth of the benchmarks, tested on the CPU."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cases import Case, Goal
from benchmarks.cli import main
from benchmarks.contenders import find_contender
from benchmarks.devices import Cpu, Cuda
from benchmarks.gpu import measure as gpu_measure
from benchmarks.gpu.clock import device_seconds, host_seconds, loop_seconds
from benchmarks.gpu.measure import GpuMeasurement, GpuPlan
from benchmarks.gpu.session import Session
from benchmarks.gpu.truth import compute_truth
from benchmarks.machine import machine_facts
from benchmarks.plot import save_plots
from benchmarks.problems import LinearProblem, LogitsProblem, make_problem
from benchmarks.process import NotMeasured
from benchmarks.progress import OutOfTime, measure_all
from benchmarks.protocol import Describe, OpenCase, Prepare, Request, Turn, decode, encode
from benchmarks.records import Record, load_records
from benchmarks.suites import SUITES, cpu, cuda, select_cases
from benchmarks.tables import Table

TABLES = (cpu.SUITES, cpu.QUICK, cuda.SUITES, cuda.QUICK)
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
        problem.leaf.grad = wrong(problem.leaf.grad)
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


def test_waiting_for_the_device_counts() -> None:
    def call(arguments: object) -> None:
        queue.work(1e-3, 1e-3)
        queue.wait()
        queue.work(1e-3, 1e-3)

    queue = Queue()
    assert device_seconds(queue, call, lambda: None, 3, 2e-3) == pytest.approx(3e-3)


def test_lead_is_at_least_as_long_as_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        clock = 0.0

        def __init__(self, enable_timing: bool) -> None:
            self.stamp = 0.0

        def record(self) -> None:
            self.stamp = Event.clock

        def elapsed_time(self, end: "Event") -> float:
            return (end.stamp - self.stamp) * 1e3

    class Memory:
        def zero_(self) -> None:
            Event.clock += 1e-4 if Event.clock else 1.0  # the first pass is slow

    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: Memory())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    device = Cuda()
    start = device.mark()
    device.lead(1.05e-3)
    assert device.elapsed(start, device.mark()) == pytest.approx(1.1e-3)


@pytest.mark.parametrize("name", ["torch", "xent", "xent inplace"])
def test_an_iteration_of_a_loop_can_be_repeated(name: str) -> None:
    case = replace(SMALL, function="logits", hidden=0, contenders=("copy", name))
    session = Session(case, Cpu())
    assert session.prepare(name)["input_gradient_error"] < 1e-5
    turn = session.turn(name, 3, 2)
    assert min(turn["loop"], turn["seconds"]) > 0
    session.prepared[name].call(session.prepared[name].set_up())
    assert session.truth is not None
    assert (
        session.truth.errors(session.problem, torch.zeros(()))["input_gradient_error"] < 1e-5
    )  # fresh logits, even if the call overwrote them


def test_a_session_measures_floors_and_losses() -> None:
    session = Session(SMALL, Cpu())
    floor, ours = session.prepare("products"), session.prepare("xent")
    assert "loss" not in floor
    assert ours["loss_error"] < 1e-5
    assert ours["host"] > 0
    assert session.turn("xent", 3, 1).keys() == {"loop", "seconds"}


def small(case: Case) -> Case:
    tokens = 2 * case.batch or 32
    return replace(case, tokens=tokens, hidden=min(case.hidden, 16), vocabulary=200 + case.vocabulary % 2, device="cpu")


GPU_CASES = list(dict.fromkeys(small(case) for suite in cuda.QUICK.values() for case in suite))


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


def test_products_have_a_vocabulary_that_is_a_multiple_of_64() -> None:
    problem = make_problem(replace(SMALL, backward=False))
    logits: Any = find_contender("linear", "products").make(SMALL)(*problem.set_up())
    assert logits.shape == (96, 128)
    assert not logits[:, 100:].any()


@pytest.mark.parametrize("suite", [suite for table in TABLES for suite in table.values()])
def test_suites_name_contenders_that_exist(suite: tuple[Case, ...]) -> None:
    for case in suite:
        for name in (*case.contenders, *(goal.contender for goal in case.goals)):
            assert find_contender(case.function, name).name == name
        assert {goal.contender for goal in case.goals} <= set(case.contenders)


def test_cases_of_a_suite_have_different_titles() -> None:
    for table in TABLES:
        for suite in table.values():
            assert len({case.title for case in suite}) == len(suite)


def test_cases_are_encoded_and_decoded() -> None:
    for device in SUITES:
        for case in select_cases(device, SUITES[device]):
            assert decode(encode(OpenCase(case))) == OpenCase(case)


class Lines:
    """A simulated measuring process: it answers at once, and dies when it measures the contender "CCE"."""

    made: list["Lines"]

    def __init__(self, module: str, environment: dict[str, str] | None = None) -> None:
        self.environment, self.runs, self.requests = environment or {}, True, list[Request]()
        self.made.append(self)

    def ask(self, request: Request, seconds: float | None = None) -> dict[str, Any]:
        self.requests.append(request)
        match request:
            case Describe():
                return {"versions": {}}
            case Prepare(contender="CCE"):
                self.runs = False
                raise NotMeasured("failed", "the process was killed")
            case Prepare(contender="Liger"):
                raise NotMeasured("absent", "liger_kernel is not installed")
            case Prepare(contender=name):
                return {"peak_bytes": 1, "host": 1e-5, "call_seconds": 1e-3, "turn_seconds": 1e-2} | {"loss": len(name)}
            case Turn(contender=name):
                return {"loop": 2.0, "seconds": 1.0} if name == "products" else {"loop": 3.0, "seconds": 1.25}
        return {}

    def __exit__(self, *_: object) -> None:
        self.runs = False


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Lines]:
    Lines.made = []
    monkeypatch.setattr(gpu_measure, "Process", Lines)
    return Lines.made


def measure(case: Case, deadline: float = float("inf")) -> list[Record]:
    with GpuMeasurement("cpu", GpuPlan(repeats=4, budget=1.0, deadline=deadline)) as measurement:
        return measurement.measure(case, {"gpu": "none", "versions": {}}, lambda name: None)


def test_contenders_take_turns_and_ratios_are_of_a_round(processes: list[Lines]) -> None:
    case = replace(SMALL, contenders=("products", "xent", "xent portable", "Liger", "CCE"))
    records = {record.contender: record for record in measure(case)}
    assert records["xent"].loop_pairs == [(2.0, 3.0)] * 4
    assert (records["xent"].quantity("loop"), records["xent"].quantity("time")) == (1.5, 1.25)
    assert (records["Liger"].status, records["CCE"].status) == ("absent", "failed")
    assert [process.environment for process in processes] == [{}, {"XENT_PORTABLE": "1"}] * 2  # restarted without CCE
    for process in processes[2:]:
        asked = {request.contender for request in process.requests if isinstance(request, Turn)}
        assert asked == ({"xent portable"} if process.environment else {"products", "xent"})


def test_a_run_that_is_out_of_time_can_be_resumed(processes: list[Lines], tmp_path: Path) -> None:
    with pytest.raises(OutOfTime):
        measure(SMALL, deadline=time.monotonic() - 1)
    cases = [SMALL, replace(SMALL, tokens=64)]
    done: list[Case] = []

    def measure_one(case: Case, *, progress: object) -> list[Record]:
        if done:
            raise OutOfTime
        done.append(case)
        return measure(case)

    lines = tmp_path / "lines.jsonl"
    records, left = measure_all(cases, measure_one, lines)
    assert (done, left) == (cases[:1], cases[1:])
    assert load_records(lines) == records
    done.clear()
    records, left = measure_all(cases, measure_one, lines, load_records(lines))
    assert (done, left) == (cases[1:], [])
    assert load_records(lines) == records
    assert len(lines.read_bytes()) < 4000


def test_a_run_is_shown_and_written_into_a_document(
    processes: list[Lines], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = replace(SMALL, contenders=("products", "xent"), goals=(Goal("xent", "loop", 1.2),))
    lines, document = tmp_path / "lines.jsonl", tmp_path / "text.md"
    measure_all([case], lambda case, progress: measure(case), lines)
    document.write_text(
        "before\n<!-- measured: test -->\nold\n<!-- end -->\nafter\n<!-- measured: other -->\n<!-- end -->"
    )
    show = ["--show", str(lines), "--out", str(tmp_path)]
    assert main([*show, "--markdown", "--into", str(document)]) == 0
    rows = [
        f"| linear 96x16x100 float32 | products {base} ms | {ratio} |"
        for base, ratio in (("2e+03", "1.50"), ("1e+03", "1.25"))
    ]
    printed, text = capsys.readouterr().out, document.read_text()
    assert all(row in printed and row in text for row in rows)
    assert "old" not in text
    assert text.endswith("after\n<!-- measured: other -->\n<!-- end -->")
    assert main(show) == 0
    assert "missed   loop at most 1.2, measured 1.5" in capsys.readouterr().out


@pytest.mark.parametrize("base", [0, 2**12, 2**24])
def test_memory_has_no_ratio_to_a_few_pages(base: int, tmp_path: Path) -> None:
    case = replace(CASES[0], contenders=("torch", "xent"))
    shared = {"seconds": [1.0], "base_peak_bytes": base, "machine": machine_facts() | {"versions": {"torch": "2"}}}
    records = [Record(case, "torch", peak_bytes=base, **shared)]
    records += [Record(case, "xent", peak_bytes=2**23, pairs=[(1.0, 1.0)], **shared)]
    assert records[1].quantity("memory") == (0.5 if base == 2**24 else None)
    assert records[1].quantity("memory beyond gradients") == records[1].quantity("memory")
    assert save_plots(records, tmp_path / "plot")


def test_smallest_number_of_a_row_is_bold() -> None:
    headings, row = ("case", "base", "xent", "Liger"), ("linear", "products 2 ms", "1.50", "1.25")
    assert "| 1.50 | **1.25** |" in Table("", headings, (row,), frozenset({"xent"})).markdown()
    assert "**" not in Table("", headings[:3], (row[:3],), frozenset({"xent"})).markdown()


def test_the_command_measures_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--device", "cpu", "--suite", "host", "--quick", "--out", str(tmp_path)]
    assert main(command) == 0
    assert "Host time, microseconds per call" in capsys.readouterr().out
    lines = tmp_path / "cpu-host-quick.jsonl"
    before = lines.read_text()
    assert {record.contender for record in load_records(lines)} == {"torch", "xent"}
    assert main([*command, "--resume"]) == 0
    assert lines.read_text() == before
