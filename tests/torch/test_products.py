"""Matrix products of PyTorch's calls: none for gradients that nobody requires, and none of ignored rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import xent
from tests.targets import Target

ROWS, WIDTH, V = 6, 8, 64  # a number of classes that CUDA does not pad
PRODUCT = 2 * ROWS * WIDTH * V


_PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::mv",
    "aten::addmv",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_addmm_activation",
)


def flops_of(function: Callable[[], Any]) -> int:
    """Return the multiplications and additions of all matrix products of a call, on the CPU and on a GPU.

    Unlike a FlopCounterMode, the profiler sees operations inside of custom operations and does not change the call.
    """
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profiler:
        function()
    return sum(_flops(event) for event in profiler.events() if event.name in _PRODUCTS)


def _flops(event: Any) -> int:
    """Return 2 m n k for a product of (m, k) and (k, n), also in batches."""
    shapes = [shape for shape in event.input_shapes if len(shape) >= 1]
    if "add" in event.name:
        shapes = shapes[1:]
    left, right = shapes[:2]
    found = 2
    for size in left:
        found *= size
    return found * (right[-1] if len(right) > 1 else 1)


def flops(target: Target, needs: tuple[bool, bool, bool], ignored: int = 0, **options: Any) -> int:
    """Count the multiplications and additions of matrix products, forward and backward."""
    torch.manual_seed(0)
    leaves = [torch.randn(size, device=target.device) for size in ((ROWS, WIDTH), (V, WIDTH), (V,))]
    classes = torch.arange(ROWS, device=target.device)
    classes[:ignored] = -100
    given = [leaf.requires_grad_(need) for leaf, need in zip(leaves, needs, strict=True)]

    def call() -> None:
        bias = given[2] if needs[2] else None
        made = xent.linear_cross_entropy(*given[:2], classes, linear_bias=bias, backend=target.name, **options)
        loss = made[0] if "stats" in options else made
        if any(needs) and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            loss.backward(torch.ones_like(loss))
            assert [leaf.grad is not None for leaf in given] == list(needs)
        assert loss.requires_grad == (any(needs) and torch.is_grad_enabled())

    call()  # what is found out once is no work of a call
    for leaf in given:
        leaf.grad = None
    return flops_of(call)


@pytest.mark.parametrize(
    ("needs", "products"),
    [
        ((True, True, True), 3),
        ((True, True, False), 3),
        ((True, False, False), 2),
        ((False, True, False), 2),
        ((False, False, True), 1),
        ((False, False, False), 1),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_number_of_matrix_products(
    target: Target, needs: tuple[bool, bool, bool], products: int, reduction: str
) -> None:
    again = reduction == "none" and any(needs)
    assert flops(target, needs, reduction=reduction) == (products + again) * PRODUCT


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("ignored", "rows"), [(0, 6), (2, 4), (6, 0)])
@pytest.mark.parametrize("stats", [{}, {"stats": ("lse", "predictions")}], ids=str)
def test_ignored_rows_are_not_multiplied(
    target: Target, ignored: int, rows: int, reduction: str, stats: dict[str, Any]
) -> None:
    """On a GPU the first chunk, here of 2 rows, starts before their number is known."""
    again = reduction == "none"
    found = flops(target, (True, True, False), ignored, reduction=reduction, workspace=2 * V * 4, **stats)
    if target.name == "torch" and target.device == "cpu":
        assert found == (3 + again) * PRODUCT * rows // ROWS
    elif target.device == "cpu":
        assert found <= (3 + again) * PRODUCT * rows // ROWS + again * PRODUCT
    else:
        assert found <= 4 * PRODUCT * max(rows, 2) // ROWS + again * PRODUCT


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient_without_grad_mode(target: Target, reduction: str, mode: Any) -> None:
    """One product makes the logits."""
    with mode():
        assert flops(target, (True, True, True), reduction=reduction) == PRODUCT
