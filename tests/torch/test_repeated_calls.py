"""A call gives the same whatever calls were made before it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target

FUNCTIONS = ("cross_entropy", "linear_cross_entropy")
CHANGES = {
    "rows": {"rows": 4},
    "classes": {"vocabulary": 11},
    "dtype": {"dtype": torch.bfloat16},
    "strides": {"aligned": False},
    "target": {"ignored": True},
    "backward pass": {"asks": False},
    "reduction": {"reduction": "none"},
    "normalizer": {"normalizer": 7.0},
    "softcap": {"softcap": 2.0},
    "logit_scale": {"logit_scale": -0.5},
    "label_smoothing": {"label_smoothing": 0.2},
    "statistics": {"stats": ("predictions", "entropy")},
}


def results_of(
    target: Target, function: str, *, rows: int = 6, vocabulary: int = 12, dtype: torch.dtype = torch.float32,
    aligned: bool = True, ignored: bool = False, asks: bool = True, **options: Any,
) -> list[Tensor]:  # fmt: skip
    """Return the loss, the statistics and the gradients of tensors that only depend on the arguments."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, vocabulary)] if function == "cross_entropy" else [(rows, 8), (vocabulary, 8)]
    drawn = [torch.randn(shape, generator=generator).to(target.device, dtype) for shape in shapes]
    if not aligned:
        drawn[0] = torch.cat([drawn[0].new_zeros(1), drawn[0].flatten()])[1:].view(shapes[0])
    leaves = [tensor.requires_grad_(asks) for tensor in drawn]
    classes = torch.arange(rows, device=target.device)
    classes[1:3] = -100 if ignored else 5
    made = getattr(xent, function)(*leaves, classes, backend=target.name, **options)
    loss, stats = made if isinstance(made, tuple) else (made, None)
    found = [loss, *(getattr(stats, name) for name in options.get("stats", ()))]
    return [*found, *torch.autograd.grad(loss.sum(), leaves)] if asks else found


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("change", CHANGES)
def test_calls_do_not_depend_on_earlier_calls(target: Target, function: str, change: str) -> None:
    """Calls that differ in one argument, in turn. Each gives the same bits every time, which are not the other's."""
    first, changed, *again = (
        results_of(target, function, **options) for options in ({}, CHANGES[change], {}, CHANGES[change])
    )
    for found, expected in zip(again, (first, changed), strict=True):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
            assert torch.equal(one, other)
    same = [one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(first, changed, strict=False)]
    assert len(first) != len(changed) or not all(same) or change == "strides"
