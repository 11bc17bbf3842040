"""Rows so long that several programs may share one: the same results as float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import xent
from tests.covering import dealt
from tests.targets import Target
from tests.triton.judged import DTYPES, OPTIONS, Rows, Upstream, compare, draw

STATS = ("lse", "nll", "entropy", "predictions", "accuracy", "log_sum_sq_probs", "mean_logit", "z_loss", "count")
LONG = {torch.float32: (32_000, 50_257), torch.bfloat16: (65_600, 80_001)}
CASES = [(dtype, vocabulary) for dtype in LONG for vocabulary in LONG[dtype]]


@pytest.mark.parametrize(*dealt(case=CASES, name=OPTIONS))
def test_options(target: Target, case: tuple[torch.dtype, int], name: str) -> None:
    dtype, vocabulary = case
    compare(draw(target, vocabulary, dtype, name, "loss", rows=3))


@pytest.mark.parametrize(*dealt(case=CASES, options=[{}, {"logit_scale": -0.5, "z_loss": 0.1}, {"softcap": 3.0}]))
def test_statistics(target: Target, case: tuple[torch.dtype, int], options: dict[str, Any]) -> None:
    """Also where a part has no logit near the largest one, or the largest of a part is the first of equal ones."""
    dtype, vocabulary = case
    rows, third = draw(target, vocabulary, dtype, rows=7), vocabulary // 3
    rows.logits[1, third:] -= 3000
    rows.logits[3, : 2 * third] = -1e4
    rows.logits[4, third + 5] = 200
    rows.logits[5, :] = 1  # the first of equal classes is the prediction
    rows.target[5] = third
    judge(rows, ("loss", "lse", "nll", "entropy"), options=options)


@pytest.mark.parametrize(*dealt(dtype=LONG, which=["lse", "nll", "entropy"]))
def test_gradients_of_statistics(target: Target, dtype: torch.dtype, which: str) -> None:
    """Also of rows without a weight."""
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5], device=target.device)
    judge(draw(target, LONG[dtype][0], dtype, rows=4), ("loss", which), sample_weight=weights)


def judge(rows: Rows, which: tuple[str, ...], **more: Any) -> None:
    each = torch.linspace(-1, 2, 4 * len(rows.target), device=rows.logits.device).view(4, -1)
    upstream = Upstream(**dict(zip(which, each, strict=False)))
    near = 2e-5 if rows.logits.dtype == torch.float32 else 2.0**-7
    compare(replace(rows, stats=STATS, upstream=upstream, **more), rtol=near, atol=1e-7)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(128_256, torch.bfloat16), (102_405, torch.float32)])
def test_repeated_calls(target: Target, vocabulary: int, dtype: torch.dtype) -> None:
    """Nothing that programs tell each other outlives a call."""
    rows = draw(target, vocabulary, dtype, asked="loss", rows=2)
    for factor in (1, -1, -0.5):
        compare(replace(rows, logits=rows.logits.mul_(factor)))


@pytest.mark.parametrize(
    *dealt(dtype=DTYPES[:2], options=[{}, {"stats": ("entropy", "accuracy")}, {"logit_scale": -0.5, "softcap": 3.0}])
)
def test_linear_losses_in_chunks(target: Target, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The logits of targets are given, rows are in another order, and targets are shifted."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = LONG[dtype][0]
    hidden, weight = torch.randn(2, 4, 16, generator=generator), torch.randn(vocabulary, 16, generator=generator) / 4
    classes = torch.randint(vocabulary, (2, 4), generator=generator)
    classes[0, 2:3], classes[1, 1:] = -100, vocabulary - 1
    found = []
    for backend, device, to in ((target.name, target.device, dtype), ("torch", "cpu", torch.float64)):
        leaves = [value.to(dtype).to(device, to).requires_grad_() for value in (hidden, weight)]
        made = xent.linear_cross_entropy(
            *leaves, classes.to(device), shift=1, workspace=3 * vocabulary * 8, backend=backend, **options
        )
        loss = made[0] if options.get("stats") else made
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    near = 1e-5 if dtype == torch.float32 else 2.0**-7
    for one, other in zip(*found, strict=True):
        close = near * float(other.abs().max())
        torch.testing.assert_close(one.cpu().double(), other, rtol=near, atol=close)
