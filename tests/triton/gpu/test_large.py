"""More than 2^31 logits: the last rows are correct, and equal to those of a call with these rows only."""

import pytest
import torch
from torch import Tensor

import xent

# More than 2.17e9 logits. Rows of 32771 classes are off the 16-byte boundaries. The last two sizes have larger blocks.
SIZES = [(70_000, 32_768), (70_000, 32_771), (50_000, 43_520), (17_000, 131_072)]
SOME = 40

pytestmark = pytest.mark.usefixtures("poisoned")


def ends(tensor: Tensor) -> Tensor:
    """Return copies of the first and the last rows."""
    return torch.cat([tensor[:SOME], tensor[-SOME:]])


@pytest.mark.parametrize(("rows", "vocabulary"), SIZES)
def test_logits(rows: int, vocabulary: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(rows, vocabulary, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocabulary, (rows,), device="cuda")
    target[::5] = -100
    few, few_targets = ends(logits.detach()).requires_grad_(), ends(target)
    options = {"z_loss": 1e-3, "backend": "triton"}
    mean = {"normalizer": rows, **options}
    (expected,) = torch.autograd.grad(xent.cross_entropy(few, few_targets, **mean), few)
    expected_rows = xent.cross_entropy(few.detach(), few_targets, reduction="none", **options)

    each = xent.cross_entropy(logits, target, reduction="none", **options)
    assert torch.equal(ends(each.detach()), expected_rows)
    (grad,) = torch.autograd.grad(each, logits, torch.full_like(each, 1 / rows))
    torch.testing.assert_close(ends(grad), expected)
    del grad

    loss = xent.cross_entropy(logits, target, **mean)
    torch.testing.assert_close(loss.detach(), each.detach().double().sum().float() / rows)
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(ends(grad), expected)
    del grad, loss, each

    logits = logits.detach().requires_grad_()
    loss = xent.cross_entropy(logits, target, inplace=True, **mean) * 3
    loss.backward()
    assert logits.grad is not None
    torch.testing.assert_close(ends(logits.grad), 3 * expected)


def test_linear() -> None:
    """All rows in one chunk, so that offsets inside a chunk are beyond 2^31."""
    rows, vocabulary, hidden = 70_000, 32_768, 64
    torch.manual_seed(0)
    # Logits have standard deviation 1. If stored in bfloat16, rounding changes a probability by less than 2%.
    source = (torch.randn(rows, hidden, device="cuda") / 8).bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocabulary, (rows,), device="cuda")
    target[::5] = -100
    mean = {"normalizer": rows, "backend": "triton"}
    few = ends(source.detach()).requires_grad_()
    (expected,) = torch.autograd.grad(xent.linear_cross_entropy(few, weight, ends(target), **mean), few)
    chunked = xent.linear_cross_entropy(source, weight, target, **mean)
    _, expected_weight = torch.autograd.grad(chunked, (source, weight))
    for reduction in ("mean", "none"):
        options = mean if reduction == "mean" else {"reduction": "none", "backend": "triton"}
        chunked = xent.linear_cross_entropy(source, weight, target, **options).detach()
        loss = xent.linear_cross_entropy(source, weight, target, workspace=10**10, **options)
        upstream = torch.full_like(loss, 1 / rows if reduction == "none" else 1)
        torch.testing.assert_close((loss.detach() * upstream).sum(), (chunked * upstream).sum(), rtol=1e-5, atol=0)
        grad, grad_weight = torch.autograd.grad(loss, (source, weight), upstream)
        torch.testing.assert_close(ends(grad), expected, rtol=2e-2, atol=1e-2 * float(expected.abs().max()))
        difference = (grad_weight.float() - expected_weight.float()).norm()
        assert difference <= 2**-6 * expected_weight.float().norm()
