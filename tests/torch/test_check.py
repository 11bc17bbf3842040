"""`python -m xent check` in several processes, which judge cases of backend "torch"; one may crash."""

import os
import re
import signal
from dataclasses import replace
from typing import Any

import pytest

from tests.divergence.cases import divergence_cases
from tests.options import option_cases
from tests.targets import backend_of
from xent.__main__ import main
from xent.command.check import run
from xent.command.check.harnesses import harness_of
from xent.command.check.run import FUNCTIONS, Work, check_all, summary


def few_cases() -> dict[Any, Any]:
    cases = {}
    for function in FUNCTIONS[:2]:
        every = option_cases(function, "float32")
        cases[function, "float32"] = every[:14:4] + every[1:4]
    cases["divergence", "float32"] = divergence_cases("divergence", "float32")[:2]
    return cases


def test_several_processes_have_the_results_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of("torch")
    monkeypatch.setattr(run, "_NEIGHBOURS", 2)
    lines, sentences = [], []
    for processes in (1, 2):
        harness = harness_of(backend, "cpu")
        monkeypatch.setattr(harness, "processes", processes)
        work = Work(backend, "cpu", harness, few_cases())
        lines.append(list(check_all([work])))
        sentences.append(summary([work], lines[-1]))
    assert lines[0] == lines[1]
    assert sentences[0] == sentences[1]
    assert sentences[0].startswith(f"All {len(work)} cases passed; torch on cpu ran ")


class Deadly:
    """A number that ends the process that adds it to an array."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def __radd__(self, other: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL) if self.code is None else os._exit(self.code)


@pytest.mark.full("src/command/")
def test_a_process_that_ends_is_a_failed_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are judged, in a new process."""
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
    monkeypatch.setattr(type(harness_of(backend_of("torch"), "cpu")), "processes", 2)
    assert main(["check", "torch"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^torch +cpu +cross_entropy +float32 +6 .* 2 failed$", printed, re.MULTILINE)
    for case in dead:
        command = f"python -m xent check torch --case '{case}'"
        assert f"FAILED {case}: the process ended; to run it alone: {command}\n" in printed
    assert re.search(r"^2 of \d+ cases failed; torch on cpu ran", printed, re.MULTILINE)
    assert main(["check", "torch", "--case", str(dead[1])]) == 1
    assert "1 of 1 cases failed" in capsys.readouterr().out
    assert main(["check", "torch", "--case", str(good[1])]) == 0
    assert main(["check", "torch", "--case", "another"]) == 2
    assert "there is no case 'another'" in capsys.readouterr().err
