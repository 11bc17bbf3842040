"""Shapes for the product kernels: losses of `linear_cross_entropy` that do not need logits later.

Without a Hopper GPU the tiles run and must pass the same tests.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.cases import paired_cases
from tests.options import OPTIONS
from tests.targets import Target
from xent.command.check.case import Case

SHAPES = {
    "a row": (1, 72, 300),
    "one tile": (128, 64, 256),
    "fewer tiles than programs": (1700, 128, 1031),
    "more tiles than programs": (300, 200, 40_009),
}
NAMES = ["plain", "z_loss", "softcap", "scale, negative", "softcap, z_loss", "sample_weight"]
DTYPES = [torch.bfloat16, torch.float16]


def shape_of(target: Target, name: str) -> tuple[int, int, int]:
    """Return rows, width and classes; smaller if kernels are interpreted."""
    rows, width, vocabulary = SHAPES[name]
    return (min(rows, 3), width, min(vocabulary, 1031)) if target.interpreted else (rows, width, vocabulary)


def draw(target: Target, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, classifier and classes, with the first and last class and ignored rows."""
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
    target.judge(replace(case, ignored=0.2 if rows > 1 else 0.0))


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.01}, {"softcap": 5.0}, {"logit_scale": -0.5}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_without_gradients(target: Target, name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """At least as exact as rounded logits. On a GPU, tests/triton/gpu has stricter bounds for the product kernel."""
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
def test_very_probable_targets(target: Target, name: str, dtype: torch.dtype) -> None:
    """Their loss is the probability of the other classes, for which 1 - p in float32 would have few correct bits."""
    hidden, weight, classes = draw(target, name, dtype)
    classes = torch.arange(len(hidden), device=target.device) % len(weight)
    hidden = weight[classes] * 30 / weight[classes].float().square().sum(-1, keepdim=True).to(dtype)
    found = xent.linear_cross_entropy(hidden, weight, classes, reduction="none", backend=target.name)
    logits = hidden.double() @ weight.double().t()
    at_target = logits.gather(1, classes[:, None])
    expected = (logits.scatter(1, classes[:, None], -torch.inf).logsumexp(-1) - at_target[:, 0]).exp().log1p()
    assert float(expected.max()) < 1e-3
    torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=0)


def test_views_of_factors(target: Target) -> None:
    """Rows with gaps, rows that share memory, and rows off the 16-byte boundaries."""
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
        # Up to the rounding of logits, which tiles have.
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("options", [name for name, given in OPTIONS.items() if "label_smoothing" not in given])
@pytest.mark.parametrize("rows", [(7,), (2, 5)])
def test_gradients_of_every_option(target: Target, options: str, rows: tuple[int, ...]) -> None:
    vocabulary = 67 if target.interpreted else 1031
    case = Case("linear_cross_entropy", rows, vocabulary, "bfloat16", options, OPTIONS[options], "none", 64)
    target.judge(replace(case, ignored=0.2))


OF_ROWS = [case for name in ("linear_cross_entropy", "linear_log_probs") for case in paired_cases(name, ("bfloat16",))]


@pytest.mark.parametrize("case", OF_ROWS[::2], ids=str)
def test_gradients_of_statistics(target: Target, case: Case) -> None:
    """In several chunks."""
    case = replace(target.sized(case), vocabulary=320, hidden=64)
    target.judge(case, workspace=case.vocabulary * 2 * 9)
