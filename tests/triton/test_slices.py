"""Gradients from slices of classes, which take the place of very many small chunks of rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import xent
from tests.targets import Target
from tests.triton.sure import check_sure_targets
from xent.backends.torch import schedule, slices
from xent.core import chunks
from xent.core.check.cases import Case, option_cases
from xent.core.check.judge import judge_case

NAMES = ("plain", "smoothing", "ignore_index, a class", "weight, sample_weight", "all", "all, bias", "all, shift")
CASES = [
    replace(case, rows=(4, 5))
    for case in option_cases("linear_cross_entropy", "bfloat16")
    if case.name in NAMES and case.reduction in ("mean", "none")
]
ROW = CASES[0].vocabulary * 2
"""Bytes of one row of logits: 20 chunks."""


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many classes the slices had, of each call that was sliced; here they may be few."""
    found: list[int] = []
    function = slices.gradients

    def watched(*args: Any) -> Any:
        found.append(args[-1])
        return function(*args)

    monkeypatch.setattr(slices, "gradients", watched)
    monkeypatch.setattr(chunks, "_TILE_CLASSES", 1)
    return found


def test_cases() -> None:
    assert {case.name for case in CASES} == set(NAMES)
    assert len(CASES) == 2 * len(NAMES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients(target: Target, case: Case, sliced: list[int]) -> None:
    for comparison in judge_case(target.backend, target.harness, case, workspace=ROW):
        assert comparison.passed, comparison
    assert set(sliced) == {3}


@pytest.mark.parametrize("known", [True, False])
def test_what_needs_no_gradient_and_what_nobody_may_see(
    target: Target, known: bool, sliced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 weights under autocast, hidden states without a gradient, of which ignored ones are NaN; statistics.

    `known`: whether the host can see which are ignored, or it cannot, as in a CUDA graph.
    """
    if not known:
        monkeypatch.setattr(schedule, "_host_sees", lambda tensor: False)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 8, generator=generator) for size in (20, 67))
    classes = torch.randint(67, (20,), generator=generator)
    classes[3:9], hidden[3:9] = -100, torch.nan
    hidden, classes, weight = (value.to(target.device) for value in (hidden, classes, weight))
    weight.requires_grad_()

    def gradient(workspace: int | None) -> tuple[Any, ...]:
        with torch.autocast(target.device, torch.bfloat16):
            loss, stats = xent.linear_cross_entropy(
                hidden, weight, classes, workspace=workspace, stats=("lse", "accuracy"), backend=target.name
            )
        return loss, *torch.autograd.grad(loss, weight), stats.lse, stats.accuracy

    found = gradient(ROW)
    assert len(sliced) == 1
    for ours, expected in zip(found, gradient(None), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, expected, rtol=2.0**-7, atol=1e-4)
    assert len(sliced) == 1


def test_gradient_of_sure_targets(target: Target, sliced: list[int]) -> None:
    check_sure_targets(target, 20, workspace=ROW)
    assert len(sliced) == 1


def test_every_target_ignored(target: Target, sliced: list[int]) -> None:
    hidden = torch.randn(20, 8, dtype=torch.bfloat16, device=target.device).requires_grad_()
    weight = torch.randn(67, 8, dtype=torch.bfloat16, device=target.device).requires_grad_()
    classes = torch.full((20,), -100, device=target.device)
    loss = xent.linear_cross_entropy(hidden, weight, classes, workspace=ROW, backend=target.name)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    assert len(sliced) == 1
    assert not any(value.any() for value in (loss, *gradients))
