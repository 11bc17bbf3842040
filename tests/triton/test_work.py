"""Work of calls whose rows are computed by kernels: matrix products, and rows with weight 0 or without a target."""

from typing import Any

import pytest
import torch

import xent
from tests.targets import Target
from tests.torch.products import flops_of

ROWS, WIDTH, V = 6, 8, 64  # a number of classes that CUDA does not pad
PRODUCT = 2 * ROWS * WIDTH * V


def draw(target: Target) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return hidden states, a classifier and a bias; classes."""
    torch.manual_seed(0)
    leaves = [torch.randn(size, device=target.device) for size in ((ROWS, WIDTH), (V, WIDTH), (V,))]
    return leaves, torch.arange(ROWS, device=target.device)


def flops(target: Target, needs: tuple[bool, bool, bool], ignored: int = 0, **options: Any) -> int:
    """Count multiplications and additions, forward and backward."""
    leaves, classes = draw(target)
    classes[:ignored] = -100
    given = [leaf.requires_grad_(need) for leaf, need in zip(leaves, needs, strict=True)]

    def call() -> None:
        bias = given[2] if needs[2] else None
        loss = xent.linear_cross_entropy(*given[:2], classes, linear_bias=bias, backend=target.name, **options)
        if any(needs):
            loss.backward(torch.ones_like(loss))
        assert [leaf.grad is not None for leaf in given] == list(needs)

    return flops_of(call)


@pytest.mark.parametrize(
    ("needs", "products"),
    [
        ((True, True, True), 3),
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
def test_ignored_rows_are_not_multiplied(target: Target, ignored: int, rows: int, reduction: str) -> None:
    """On a GPU the first chunk, here of 2 rows, starts before their number is known."""
    found = flops(target, (True, True, False), ignored, reduction=reduction, workspace=2 * V * 4)
    if target.device == "cpu":
        assert found <= (4 if reduction == "none" else 3) * PRODUCT * rows // ROWS + (reduction == "none") * PRODUCT
    else:
        assert found <= 4 * PRODUCT * max(rows, 2) // ROWS + (reduction == "none") * PRODUCT


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_rows_with_weight_0_have_statistics(target: Target, reduction: str, needs: tuple[bool, bool]) -> None:
    """Their hidden states are replaced by zeros only for the classifier's gradient."""
    (hidden, weight, _), classes = draw(target)
    leaves = [hidden.requires_grad_(needs[0]), weight.requires_grad_(needs[1])]
    sample = torch.ones(ROWS, device=target.device)
    sample[2:4] = 0
    names = ("lse", "nll", "entropy", "predictions")
    kinds = {"reduction": reduction, "stats": names, "sample_weight": sample, "workspace": 2 * V * 4}
    for target_of in (classes, torch.nn.functional.one_hot(classes, V).float()):
        found, expected = (
            xent.linear_cross_entropy(*leaves, target_of, backend=backend, **kinds)[1]
            for backend in (target.name, "torch")
        )
        for name in names:
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
