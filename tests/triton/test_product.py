"""Shapes for the product kernel: losses of `linear_cross_entropy` that need no logits again.

Where there is no Hopper GPU tiles pass the same tests.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target
from xent.backends.triton.tile_kernels import join_kernel
from xent.core.check.cases import OPTIONS, Case
from xent.core.check.judge import judge_case

SHAPES = {
    "a row": (1, 72, 300),
    "one tile": (128, 64, 256),
    "fewer tiles than programs": (1700, 128, 1031),
    "more tiles than programs": (300, 200, 40_009),
}
NAMES = ["plain", "z_loss", "softcap", "scale, negative", "softcap, z_loss", "sample_weight"]
DTYPES = [torch.bfloat16, torch.float16]


def shape_of(target: Target, name: str) -> tuple[int, int, int]:
    """Return rows, width and classes; few where they are interpreted."""
    rows, width, vocabulary = SHAPES[name]
    return (min(rows, 3), width, min(vocabulary, 1031)) if target.interpreted else (rows, width, vocabulary)


def draw(target: Target, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, classifier and classes: the first and last class among them, and ignored rows."""
    torch.manual_seed(0)
    rows, width, vocabulary = shape_of(target, name)
    hidden, weight = torch.randn(rows, width), 2 * torch.randn(vocabulary, width) / width**0.5
    classes = torch.randint(vocabulary, (rows,))
    classes[0], classes[rows // 2], classes[2::5] = vocabulary - 1, 0, -100
    return hidden.to(target.device, dtype), weight.to(target.device, dtype), classes.to(target.device)


@pytest.mark.parametrize("options", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_and_their_gradients(target: Target, name: str, dtype: str, options: str) -> None:
    rows, width, vocabulary = shape_of(target, name)
    case = Case("linear_cross_entropy", (rows,), vocabulary, dtype, options, OPTIONS[options], "none", width)
    for comparison in judge_case(target.backend, target.harness, replace(case, ignored=0.2 if rows > 1 else 0.0)):
        assert comparison.passed, comparison


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.01}, {"softcap": 5.0}, {"logit_scale": -0.5}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_without_gradients(target: Target, name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """To the rounding of logits, at least; the product kernel, which rounds none, is held to more on a GPU."""
    hidden, weight, classes = draw(target, name, dtype)
    kinds = {"reduction": "none", "stats": ("lse", "nll"), **options}
    loss, stats = xent.linear_cross_entropy(hidden, weight, classes, backend=target.name, **kinds)
    wide = (value.double().cpu() for value in (hidden, weight))
    expected, expected_stats = xent.linear_cross_entropy(*wide, classes.cpu(), backend="torch", **kinds)
    close = torch.finfo(dtype).eps
    for found, right in ((loss, expected), (stats.lse, expected_stats.lse), (stats.nll, expected_stats.nll)):
        torch.testing.assert_close(found.double().cpu(), right, rtol=close, atol=close)
    assert bool((loss[classes < 0] == 0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_sure_targets(target: Target, name: str, dtype: torch.dtype) -> None:
    """Their loss is the others' probability, of which 1 - p in float32 would have few bits or none."""
    hidden, weight, classes = draw(target, name, dtype)
    classes = torch.arange(len(hidden), device=target.device) % len(weight)
    hidden = weight[classes] * 30 / weight[classes].float().square().sum(-1, keepdim=True).to(dtype)
    found = xent.linear_cross_entropy(hidden, weight, classes, reduction="none", backend=target.name)
    logits = hidden.double() @ weight.double().t()
    at_target = logits.gather(1, classes[:, None])
    expected = (logits.scatter(1, classes[:, None], -torch.inf).logsumexp(-1) - at_target[:, 0]).exp().log1p()
    assert float(expected.max()) < 1e-3
    torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=0)


def test_rows_of_nan_stay_alone(target: Target) -> None:
    hidden, weight, classes = draw(target, "fewer tiles than programs", torch.bfloat16)
    rows = torch.tensor([0, 1, 2, 127, 128, 1699])[: len(hidden)].clamp(max=len(hidden) - 1)
    hidden[rows] = torch.nan
    classes[:] = 7
    loss = xent.linear_cross_entropy(hidden, weight, classes, reduction="none", backend=target.name)
    assert loss.isnan().nonzero()[:, 0].tolist() == sorted(set(rows.tolist()))


def test_views_of_factors(target: Target) -> None:
    """Rows with something between them, rows that share memory, and rows off the boundaries of 16 bytes."""
    torch.manual_seed(0)
    rows = 3 if target.interpreted else 300
    wide, weight = torch.randn(rows, 208).to(target.device, torch.bfloat16), torch.randn(300, 208)
    weight = weight.to(target.device, torch.bfloat16)
    classes = torch.randint(300, (rows,), device=target.device)
    for hidden, factor in (
        (wide[:, :64], weight[:, :64]),
        (wide[:, 1:65], weight[:, 8:72]),
        (wide[:1, :64].expand(rows, -1), weight[:, :64].contiguous()),
        (wide[:, :64].contiguous(), weight.t()[:64].contiguous().t()),
    ):
        found = xent.linear_cross_entropy(hidden, factor, classes, backend=target.name)
        expected = torch.nn.functional.cross_entropy(hidden.double() @ factor.double().t(), classes)
        # To the rounding of logits, which tiles have.
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=0)


def test_sums_of_parts_are_joined(target: Target) -> None:
    """Parts without a class that is possible count for nothing, and rows of such parts alone have no sum."""
    torch.manual_seed(0)
    x = 30 * torch.randn(5, 300, 7, device=target.device)
    x[1, :, :] = x[:, 3, :] = x[2:, 4, :] = -torch.inf
    tops = x.amax(2)
    sums = (x - tops.clamp(min=-1e30)[..., None]).exp().sum(2)
    peaks, totals = torch.full((2, 300), torch.nan, device=target.device)
    join_kernel[(3,)](tops, sums, peaks, totals, 300, 5, BLOCK=128)
    expected = x.permute(1, 0, 2).flatten(1)
    assert torch.equal(peaks, expected.amax(1))
    torch.testing.assert_close(peaks + totals.log(), expected.logsumexp(1))
