"""`python -m xent check`: its cases, its summary, and what counts as a failure."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.divergence.cases import divergence_cases
from tests.options import option_cases
from tests.targets import Target
from xent.__main__ import main
from xent.command.check import run
from xent.command.check.case import Case
from xent.command.check.judge import Comparison, judge_case
from xent.command.check.run import FUNCTIONS, Work, check_all, planned, reaching, summary


@pytest.mark.parametrize("function", FUNCTIONS)
def test_device_cases_pass(target: Target, function: str) -> None:
    for dtype in target.harness.dtypes:
        cases = reaching(target.harness, function, dtype)
        assert function.endswith("divergence") or any(case.alone for case in cases)
        for case in cases[:: 5 if target.slow else 1]:
            for comparison in judge_case(target.backend, target.harness, case):
                assert comparison.passed, (str(case), comparison)
                assert comparison.bound < 0.5, "a zero gradient must not pass"


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


def test_check_passes_and_prints_a_table(
    target: Target, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(harness: Any, function: str, dtype: str, full: bool) -> list[Any]:
        if function.endswith("divergence"):
            return divergence_cases(function, dtype)[:2]
        return [target.sized(case) for case in option_cases(function, dtype)[::40]]

    monkeypatch.setattr(run, "cases_of", some)
    assert main(["check", target.name]) == 0
    first, *table, last = capsys.readouterr().out.splitlines()
    assert re.search(rf"^\d+ cases for {target.name} on .*: about \d+ s\.$", first)
    works = planned([target.name])
    assert sum("passed" in line for line in table) == 6 * sum(len(work.harness.dtypes) for work in works)
    assert last.startswith("All ")
    assert all(f"{work} ran " in last for work in works)


def test_check_fails_when_a_gradient_is_wrong(
    target: Target, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "cases_of", lambda _, function, dtype, full: option_cases(function, dtype)[:3])
    monkeypatch.setattr(run, "judge_case", lambda *_: [Comparison("logits", float("nan"), 1.0)])
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # cases run in this process, where `judge_case` is replaced
    assert main(["check", target.name]) == 1
    printed = capsys.readouterr().out
    assert "3 failed" in printed
    assert "FAILED cross_entropy-4x12x67-float32-mean-plain: logits" in printed


@pytest.mark.parametrize("name", ["numpy", "nonsense"])
def test_check_of_an_unavailable_backend(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", name]) == 2
    assert f"{name} cannot be checked" in capsys.readouterr().err
