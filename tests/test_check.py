"""`python -m xent check`: its cases, its progress, its summary, and what counts as a failure."""

import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from tests.divergence.cases import divergence_cases
from tests.options import option_cases
from tests.targets import Target, backend_of
from xent.__main__ import main
from xent.command.check import run
from xent.command.check.case import Case
from xent.command.check.judge import Comparison, judge_case
from xent.command.check.run import FUNCTIONS, Work, check_all, chunk_cases, covering, pairs, planned, reaching, summary


@pytest.mark.parametrize("function", FUNCTIONS)
def test_device_cases_pass(target: Target, function: str) -> None:
    for dtype in target.harness.dtypes:
        cases = reaching(target.harness, function, dtype)
        assert function.endswith("divergence") or any(case.alone for case in cases)
        for case in cases[:: 5 if target.slow else 1]:
            for comparison in judge_case(target.backend, target.harness, case):
                assert comparison.passed, (str(case), comparison)
                assert comparison.bound < 0.5, "a zero gradient must not pass"


def test_results_without_gradients_are_judged(target: Target) -> None:
    case = Case("cross_entropy", (3,), 50, "float32", "")
    outputs = [result.output for result in judge_case(target.backend, target.harness, replace(case, alone=True))]
    assert outputs == ["loss", "logits", "loss without gradients"]


def test_chunk_cases_have_several_chunks(target: Target) -> None:
    one, several, *_ = chunk_cases("linear_cross_entropy", "float32")
    assert one.workspace is None
    assert several.workspace is not None
    assert several.workspace // (several.vocabulary * 4) * 3 < several.rows[0]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_size_is_reached_in_one_dtype(function: str) -> None:
    cases = reaching(Watched(), function, "bfloat16")
    assert len(cases) == len({str(case) for case in cases})
    assert len(reaching(Watched(), function, "float16")) < len(cases)
    if function.endswith("divergence"):
        assert {case.teacher for case in cases} == {"logits", "linear", "bucket", "renormalize", "drop"}
    else:
        assert {67, 40_000} <= {case.vocabulary for case in cases}


def test_a_covering_set_has_every_pair() -> None:
    factors = {"a": ({"a": 0}, {"a": 1}, {"a": 2}), "b": ({}, {"b": 1}), "c": ({"c": 0}, {"c": 1}, {"c": 2})}
    rows = covering(factors, "some")
    for one, other in combinations(range(3), 2):
        values = list(factors.values())
        found = [(row[one], row[other]) for row in rows]
        assert all((left, right) in found for left in values[one] for right in values[other])
    assert len(rows) <= 12


@pytest.mark.parametrize("function", FUNCTIONS)
def test_pairs_are_cases_with_names_of_their_own(function: str) -> None:
    cases = pairs(function, "float32")
    assert 10 < len(cases) < 40
    assert len({str(case) for case in cases}) == len(cases)


class Watched:
    """A harness with two kernels, of which only the first runs."""

    dtypes, kernels, processes, seconds = ("float64",), ("first", "second"), 1, 2.0

    def __init__(self) -> None:
        self.has_passed = False

    @contextmanager
    def watched(self) -> Iterator[set[str]]:
        seen = set()
        yield seen
        seen.add("first with 512 threads")

    def sizes(self, dtype: str) -> dict[str, int]:
        return {"long": 40_000}

    def passed(self) -> None:
        self.has_passed = True


def work(harness: Any) -> Work:
    backend = type("Backend", (), {"name": "some"})()
    made = {
        function: [*option_cases(function, "float64")[:2], Case(function, (2,), 40_000, "float64", "long")]
        for function in FUNCTIONS[:2]
    }
    return Work(backend, "chip", harness, {(function, "float64"): cases for function, cases in made.items()}, True)


def test_summary_names_the_kernels_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Watched()
    planned_work = work(harness)
    monkeypatch.setattr(run, "judge_case", lambda *_: [Comparison("loss", 0.0, 1.0)])
    lines = list(check_all([planned_work]))
    assert [line.cases for line in lines] == [3, 3]
    sentence = "All 6 cases passed; some on chip ran first with 512 threads (not reached: second)."
    assert summary([planned_work], lines) == sentence
    assert harness.has_passed


def judged_with(what: Any) -> Any:
    """Return a judge that does something at the long case."""

    def judge(backend: Any, harness: Any, case: Case) -> list[Comparison]:
        if case.name == "long":
            what()
        return [Comparison("loss", 0.0, 1.0)]

    return judge


def test_errors_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Unable to build metal library")

    harness = Watched()
    planned_work = work(harness)
    monkeypatch.setattr(run, "judge_case", judged_with(fail))
    lines = list(check_all([planned_work]))
    assert [len(line.failed) for line in lines] == [1, 1]
    assert "RuntimeError: Unable to build metal library" in lines[0].failed[0]
    assert summary([planned_work], lines).startswith("2 of 6 cases failed; ")
    assert not harness.has_passed


def test_a_fast_path_that_is_off_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are right; but a backend that has to be proven is not."""
    note = "a Metal kernel of xent does not run on this GPU, and MLX's operations take its place"
    harness = Watched()
    planned_work = work(harness)
    monkeypatch.setattr(run, "judge_case", judged_with(lambda: warnings.warn(note, RuntimeWarning, stacklevel=1)))
    lines = list(check_all([planned_work]))
    assert [len(line.failed) for line in lines] == [0, 0]
    assert planned_work.notes == {note}
    assert summary([planned_work], lines).startswith("All 6 cases passed; ")
    assert not harness.has_passed


def few_cases() -> dict[Any, Any]:
    cases = {}
    for function in FUNCTIONS[:2]:
        every = option_cases(function, "float32")
        cases[function, "float32"] = every[:14:4] + every[1:4]
    cases["divergence", "float32"] = divergence_cases("divergence", "float32")[:2]
    return cases


def test_several_processes_have_the_results_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend is "torch", which runs in any process on every machine with PyTorch."""
    pytest.importorskip("torch")
    backend = backend_of("torch")
    monkeypatch.setattr(run, "_NEIGHBOURS", 2)
    lines, sentences = [], []
    for processes in (1, 2):
        harness = backend.harness("cpu")
        monkeypatch.setattr(harness, "processes", processes)
        work = Work(backend, "cpu", harness, few_cases())
        lines.append(list(check_all([work])))
        sentences.append(summary([work], lines[-1]))
    assert lines[0] == lines[1]
    assert sentences[0] == sentences[1]
    assert sentences[0].startswith(f"All {len(work)} cases passed; torch on cpu ran ")


def test_failures_in_a_process_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    backend = backend_of("torch")
    harness = backend.harness("cpu")
    monkeypatch.setattr(harness, "processes", 2)
    good = option_cases("cross_entropy", "float32")[0]
    cases = {("cross_entropy", "float32"): [good, replace(good, dtype="float31")]}
    (line,) = check_all([Work(backend, "cpu", harness, cases)])
    assert line.cases == 2
    assert len(line.failed) == 1
    assert line.failed[0].startswith("cross_entropy-4x12x67-float31-mean-plain: ")


class Deadly:
    """A number that ends the process that adds it to an array."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def __radd__(self, other: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL) if self.code is None else os._exit(self.code)


def test_a_process_that_ends_is_a_failed_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are judged, in a new process."""
    pytest.importorskip("torch")
    good = option_cases("cross_entropy", "float32")[:4]
    dead = [replace(good[0], name=f"a name of {code}", offset=Deadly(code)) for code in (None, 3)]
    cases = [good[0], dead[0], *good[1:], dead[1]]
    monkeypatch.setattr(
        run, "cases_of", lambda harness, function, dtype, full: cases if dtype == "float32" else good[:1]
    )
    monkeypatch.setattr(run, "FUNCTIONS", ("cross_entropy",))
    monkeypatch.setattr(run, "_NEIGHBOURS", 2)
    planned = run.planned
    monkeypatch.setattr(run, "planned", lambda *given: [work for work in planned(*given) if work.device == "cpu"])
    monkeypatch.setattr(type(backend_of("torch").harness("cpu")), "processes", 2)
    assert main(["check", "torch"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^torch +cpu +cross_entropy +float32 +6 .* 2 failed$", printed, re.MULTILINE)
    for case, words in zip(dead, ("signal 9", "exit code 3"), strict=True):
        command = f"python -m xent check torch --case '{case}'"
        assert f"FAILED {case}: the process ended with {words}; to run it alone: {command}\n" in printed
    assert re.search(r"^2 of \d+ cases failed; torch on cpu ran", printed, re.MULTILINE)
    assert main(["check", "torch", "--case", str(dead[1])]) == 1
    assert "1 of 1 cases failed" in capsys.readouterr().out
    assert main(["check", "torch", "--case", str(good[1])]) == 0
    assert main(["check", "torch", "--case", "another"]) == 2
    assert "there is no case 'another'" in capsys.readouterr().err


@pytest.mark.parametrize("rich", [True, False])
def test_lines_are_shown_behind_a_bar(rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    lines = [run.Line("some", "chip", "log_probs", "float64", 3, Comparison("loss", 0.0, 1.0), ())] * 2
    assert list(run._shown(iter(lines), 2)) == lines
    assert not capsys.readouterr().out


def test_command_prints_one_sentence_per_device(
    target: Target, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(harness: Any, function: str, dtype: str, full: bool) -> list[Any]:
        if function.endswith("divergence"):
            return divergence_cases(function, dtype)[:2]
        case = target.sized(option_cases(function, dtype)[0])
        return [case, replace(case, vocabulary=300)]

    monkeypatch.setattr(run, "cases_of", few)
    assert main(["check", target.name]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert re.search(rf"^\d+ cases for {target.name} on .*: about \d+ s\.$", first)
    assert last.startswith("All ")
    for work in planned([target.name]):
        assert f"{work} ran " in last
