"""What the benchmarks on a GPU judge by, run on the CPU: a wrong truth would call a wrong gradient right."""

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.contenders import CONTENDERS, find_contender
from benchmarks.gpu.session import Session
from benchmarks.gpu.truth import compute_truth
from benchmarks.problems import LinearProblem, LogitsProblem, make_problem
from benchmarks.protocol import OpenCase, decode, encode
from benchmarks.records import Record
from benchmarks.suites import SUITES, cpu, cuda, select_cases

TABLES = (cpu.SUITES, cpu.QUICK, cuda.SUITES, cuda.QUICK)
SMALL = Case("test", "linear", 96, 16, 100, "float32", ("products", "xent"), accuracy=True)
CASES = [
    replace(SMALL, function=function, hidden=16 if function == "linear" else 0, **changes)
    for function in ("linear", "logits")
    for changes in ({}, {"reduction": "none"}, {"ignored": 0.6}, {"ignored": 0.6, "reduction": "none"})
] + [replace(SMALL, trained=("input",)), replace(SMALL, trained=("weight",))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_truth_is_what_pytorch_computes(case: Case) -> None:
    problem = make_problem(case)
    truth = compute_truth(problem)
    loss = problem.call(find_contender(case.function, "torch").make(case), problem.set_up())
    errors = truth.errors(problem, loss.double().mean().item())
    wanted = ["weight_gradient_error"] * ("weight" in case.trained) if case.function == "linear" else []
    wanted += ["input_gradient_error"] * ("input" in case.trained)
    assert sorted(errors) == sorted(["loss_error", *wanted])
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("wrong", [lambda x: -x, lambda x: 2 * x, torch.zeros_like, lambda x: x.roll(1, 0)])
@pytest.mark.parametrize("case", [SMALL, replace(SMALL, function="logits", hidden=0)], ids=lambda case: case.function)
def test_truth_sees_a_wrong_gradient(case: Case, wrong: Callable[[Tensor], Tensor]) -> None:
    problem = make_problem(case)
    problem.call(find_contender(case.function, "torch").make(case), problem.set_up())
    if isinstance(problem, LinearProblem):
        problem.weight.grad = wrong(problem.weight.grad)
    else:
        assert isinstance(problem, LogitsProblem)
        problem.received[0] = wrong(problem.received[0])
    assert max(compute_truth(problem).errors(problem, 0.0).values()) > 0.5


def test_a_session_measures_floors_and_losses() -> None:
    session = Session(SMALL)
    floor, ours = session.prepare("products"), session.prepare("xent")
    assert "loss" not in floor
    assert ours["loss_error"] < 1e-5
    assert len(session.turn("xent", 3)) == 3
    gc.unfreeze()


@pytest.mark.parametrize("suite", [suite for table in TABLES for suite in table.values()])
def test_suites_name_contenders_that_exist(suite: tuple[Case, ...]) -> None:
    for case in suite:
        for name in (*case.contenders, *case.left_out, *(goal.contender for goal in case.goals)):
            assert find_contender(case.function, name) in CONTENDERS


def test_cases_and_records_survive_json() -> None:
    for case in select_cases("cuda", SUITES["cuda"], quick=False, full=True):
        assert decode(encode(OpenCase(case))) == OpenCase(case)
        record = Record(case, case.contenders[0], case.contenders[0], seconds=[1.0, 2.0], pairs=[(1.0, 2.0)])
        assert Record.from_json(record.to_json()) == record
