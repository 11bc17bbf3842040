"""`python -m xent check`: its cases, its progress, its summary, and what counts as a failure."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from tests.cases import DTYPES
from tests.targets import Target
from xent.__main__ import main
from xent.backends import TABLE
from xent.core.check import progress as progress_module
from xent.core.check import report
from xent.core.check.cases import Case, option_cases
from xent.core.check.divergence_cases import divergence_cases
from xent.core.check.judge import Comparison, judge_case
from xent.core.check.long import chunk_cases, long_cases
from xent.core.check.report import Work, check_all, planned, summary

FUNCTIONS = ("cross_entropy", "linear_cross_entropy", "log_probs", "linear_log_probs")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_device_cases_pass(target: Target, function: str) -> None:
    for dtype in target.harness.dtypes:
        cases = target.harness.reaching(function, dtype)
        assert any(case.alone for case in cases)
        for case in cases[:: 5 if target.slow else 1]:
            for comparison in judge_case(target.backend, target.harness, case):
                assert comparison.passed, (str(case), comparison)
                assert comparison.bound < 0.5, "a zero gradient must not pass"


def test_results_without_gradients_are_judged(target: Target) -> None:
    case = Case("cross_entropy", (3,), 50, "float32", "")
    outputs = [result.output for result in judge_case(target.backend, target.harness, replace(case, alone=True))]
    assert outputs == ["loss", "logits", "loss without gradients"]


def test_chunk_cases_have_several_chunks(target: Target) -> None:
    one, several = chunk_cases("float32")[:3:2]
    assert one.workspace is None
    assert several.workspace is not None
    assert several.workspace // (several.vocabulary * 4) * 3 < several.rows[0]


def test_long_cases_are_named_by_their_reason() -> None:
    cases = long_cases("cross_entropy", "bfloat16", {"because": 9000})
    assert {case.vocabulary for case in cases} == {9000}
    assert {case.reduction for case in cases} == {"mean", "none"}
    assert all(case.name.startswith("because") for case in cases)


class Watched:
    """A harness with two kernels, of which only the first runs."""

    dtypes, kernels, processes = ("float64",), ("first", "second"), 1

    def __init__(self) -> None:
        self.has_passed = False

    @contextmanager
    def watched(self) -> Iterator[set[str]]:
        seen: set[str] = set()
        yield seen
        seen.add("first with 512 threads")

    def reaching(self, function: str, dtype: str) -> list[Case]:
        return [Case(function, (2,), 40_000, dtype, "long")]

    def passed(self) -> None:
        self.has_passed = True


def work(harness: Any, monkeypatch: pytest.MonkeyPatch) -> Work:
    monkeypatch.setattr(report, "option_cases", lambda *names: option_cases(*names)[:2])
    monkeypatch.setattr(report, "shape_cases", lambda *names: [])
    backend: Any = type("Backend", (), {"name": "some"})()
    kinds = [(function, "float64") for function in FUNCTIONS[:2]]
    return Work(backend, "chip", harness, {kind: report.cases_of(harness, *kind) for kind in kinds})


@pytest.mark.parametrize("function", [*FUNCTIONS, "divergence", "linear_divergence"])
def test_every_case_is_checked_in_some_dtype(function: str) -> None:
    """In float64 all cases are checked, in the other dtypes each option, with different reductions."""
    harness = Watched()
    every = {dtype: [*map(str, chain(*report.cases_of(harness, function, dtype)))] for dtype in DTYPES}
    alike = {dtype: {text.replace(dtype, "any") for text in every[dtype]} for dtype in DTYPES}
    for dtype in ("float32", "bfloat16", "float16"):
        assert alike[dtype] <= alike["float64"], dtype
    if not function.endswith("divergence"):
        options = {case.name for case in report.cases_of(harness, function, "float64")[0]}
        for dtype in ("float32", "bfloat16"):
            assert {case.name for case in report.cases_of(harness, function, dtype)[0]} == options
    if function in FUNCTIONS[:2]:
        assert alike["float32"] != alike["bfloat16"]


def test_summary_names_the_kernels_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    harness = Watched()
    planned_work = work(harness, monkeypatch)
    monkeypatch.setattr(report, "judge_case", lambda *_: [Comparison("loss", 0.0, 1.0)])
    lines = list(check_all([planned_work], told.append))
    assert [line.cases for line in lines] == [3, 3]
    assert len(told) == 6
    assert told[2] == "some on chip: cross_entropy-2x40000-float64-mean-long"
    expected = "All 6 cases passed; some on chip ran first with 512 threads (not reached: second)."
    assert summary([planned_work], lines) == expected
    assert harness.has_passed


def an_error() -> None:
    raise RuntimeError("Unable to build metal library")


def a_warning() -> None:
    warnings.warn("MLX's operations take its place", RuntimeWarning, stacklevel=1)


@pytest.mark.parametrize(
    ("what", "words"),
    [(an_error, "RuntimeError: Unable to build metal library"), (a_warning, "RuntimeWarning: MLX's operations take")],
)
def test_errors_and_warnings_are_failures(what: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Watched()
    planned_work = work(harness, monkeypatch)

    def judge(backend: Any, harness: Any, case: Case) -> list[Comparison]:
        if case.name == "long":
            what()
        return [Comparison("loss", 0.0, 1.0)]

    monkeypatch.setattr(report, "judge_case", judge)
    lines = list(check_all([planned_work]))
    assert [len(line.failed) for line in lines] == [1, 1]
    assert words in lines[0].failed[0]
    assert summary([planned_work], lines).startswith("2 of 6 cases failed; ")
    assert not harness.has_passed


def few_cases() -> dict[Any, Any]:
    cases: dict[Any, Any] = {}
    for function in FUNCTIONS[:2]:
        every = option_cases(function, "float32")
        cases[function, "float32"] = every[:14:4], every[1:4]
    cases["divergence", "float32"] = [], divergence_cases("divergence", "float32")[:2]
    return cases


def test_several_processes_have_the_results_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend is "torch", which runs in any process on every machine with PyTorch."""
    pytest.importorskip("torch")
    backend = TABLE["torch"]()
    monkeypatch.setattr(report, "_CASES_OF_A_PROCESS", 2)
    lines, told, sentences = [], [], []
    for processes in (1, 2):
        harness = backend.harness("cpu")
        monkeypatch.setattr(harness, "processes", processes)
        work = Work(backend, "cpu", harness, few_cases())
        heard: list[str] = []
        lines.append(list(check_all([work], heard.append)))
        told.append(sorted(heard))
        sentences.append(summary([work], lines[-1]))
    assert lines[0] == lines[1]
    assert told[0] == told[1]
    assert sentences[0] == sentences[1]
    assert sentences[0].startswith(f"All {len(told[0])} cases passed; torch on cpu ran ")


def test_failures_in_a_process_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    backend = TABLE["torch"]()
    harness = backend.harness("cpu")
    monkeypatch.setattr(harness, "processes", 2)
    good = option_cases("cross_entropy", "float32")[0]
    cases: Any = {("cross_entropy", "float32"): ([good, replace(good, dtype="float31")], [])}
    (line,) = check_all([Work(backend, "cpu", harness, cases)])
    assert line.cases == 2
    assert len(line.failed) == 1
    assert line.failed[0].startswith("cross_entropy-4x12x67-float31-mean-plain: ")


@pytest.mark.parametrize("rich", [True, False])
def test_progress(rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
        monkeypatch.setattr(progress_module, "_SECONDS", 0)
    else:
        pytest.importorskip("rich")
    with progress_module.progress(3) as tell:
        for step in range(3):
            tell(f"step {step}")
    captured = capsys.readouterr()
    assert not captured.out
    if not rich:
        assert captured.err.splitlines() == ["1 of 3: step 0", "2 of 3: step 1", "3 of 3: step 2"]


def test_command_prints_one_sentence_per_device(
    target: Target, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(harness: Any, function: str, dtype: str) -> tuple[list[Any], list[Any]]:
        if function.endswith("divergence"):
            return [], divergence_cases(function, dtype)[:2]
        case = target.sized(option_cases(function, dtype)[0])
        return [case], [replace(case, vocabulary=300)]

    monkeypatch.setattr(report, "cases_of", few)
    assert main(["check", target.name]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("All ")
    for work in planned([target.name]):
        assert f"{work} ran " in last
