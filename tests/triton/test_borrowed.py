"""First rows whose logits lie in the memory of the classifier's gradient."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import xent
from tests.targets import Target
from tests.triton.sure import check_sure_targets
from xent.backends.torch import borrowed as borrowing
from xent.backends.torch import linear, schedule
from xent.backends.torch.borrowed import Borrowed
from xent.core import chunks
from xent.core.check.cases import Case, option_cases
from xent.core.check.judge import judge_case

CASES = [
    replace(case, rows=(6, 5))
    for dtype, reduction in (("float32", "sum"), ("bfloat16", "mean"))
    for case in option_cases("linear_cross_entropy", dtype)
    if case.reduction == reduction and "probabilities" not in case.name
]
ROW = CASES[0].vocabulary * 2
"""Bytes of one row of bfloat16 logits."""


@pytest.fixture
def borrowed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many rows borrowed, of each call; here they may be few, and have several pieces and parts."""
    found: list[int] = []
    finish = Borrowed.finish

    def watched(self: Borrowed, part: Any, gradients: Any) -> None:
        found.append(part.stop)
        finish(self, part, gradients)

    monkeypatch.setattr(Borrowed, "finish", watched)
    monkeypatch.setattr(schedule, "_STEP_OF_FIRST", 5)
    monkeypatch.setattr(chunks, "_TILE_CLASSES", 1)
    monkeypatch.setattr(chunks, "_TILE_BYTES", 5 * 7 * 2)
    monkeypatch.setattr(borrowing, "rows_in_gradient", lambda rows, columns, *_: (min(rows, columns), 20))
    monkeypatch.setattr(linear, "classes_per_slice", lambda *_: None)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients(target: Target, case: Case, borrowed: list[int]) -> None:
    for comparison in judge_case(target.backend, target.harness, case, workspace=3 * ROW):
        assert comparison.passed, comparison
    assert borrowed
    assert all(0 < rows <= case.hidden for rows in borrowed)


@pytest.mark.parametrize("ignored", [[], [0, 1, 2, 30], list(range(40))])
@pytest.mark.parametrize("asks", [(True, True), (False, True)])
def test_ignored_rows_and_statistics(target: Target, borrowed: list[int], ignored: list[int], asks: Any) -> None:
    """Hidden states of ignored rows are NaN."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 24, generator=generator) for size in (40, 67))
    classes = torch.randint(67, (40,), generator=generator)
    classes[ignored], hidden[ignored] = -100, torch.nan
    hidden, classes, weight = (value.to(target.device) for value in (hidden, classes, weight))
    hidden.requires_grad_(asks[0])
    weight.requires_grad_()
    sources = [source for source in (hidden, weight) if source.requires_grad]

    def found(backend: str) -> tuple[Any, ...]:
        loss, stats = xent.linear_cross_entropy(
            hidden, weight, classes, workspace=5 * 67 * 4, stats=("lse", "accuracy", "predictions"), backend=backend
        )
        return loss, *torch.autograd.grad(loss, sources), stats.lse, stats.accuracy, stats.predictions

    for ours, expected in zip(found(target.name), found("torch"), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert borrowed == [min(24, 40 - len(ignored))]


def test_gradient_of_sure_targets(target: Target, borrowed: list[int]) -> None:
    check_sure_targets(target, 24, workspace=5 * ROW)
    assert borrowed == [24]
