"""inplace=True reuses the logits' memory, increments their version counter, and is refused if it is impossible."""

import pytest
import torch

import xent
from tests.targets import Target


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradient_is_in_the_logits_memory(target: Target, reduction: str) -> None:
    source = torch.randn(6, 9, device=target.device, requires_grad=True)
    logits = source * 1
    seen = []
    logits.register_hook(seen.append)
    version = logits._version
    loss = xent.cross_entropy(logits, torch.arange(6, device=target.device), reduction=reduction, inplace=True)
    loss.sum().backward()
    assert logits._version > version
    assert seen[0].data_ptr() == logits.data_ptr()
    torch.testing.assert_close(source.grad, logits.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_operation_that_saved_the_logits_raises(target: Target, reduction: str) -> None:
    source = torch.randn(6, 9, device=target.device, requires_grad=True)
    logits = source.exp()
    loss = xent.cross_entropy(logits, torch.arange(6, device=target.device), reduction=reduction, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_writing_to_the_logits_before_backward_raises(target: Target) -> None:
    logits = torch.randn(6, 9, device=target.device, requires_grad=True) * 1
    loss = xent.cross_entropy(logits, torch.arange(6, device=target.device), inplace=True)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_are_unchanged_without_a_gradient(target: Target) -> None:
    logits = torch.randn(6, 9, device=target.device)
    before = logits.clone()
    xent.cross_entropy(logits, torch.arange(6, device=target.device), inplace=True)
    torch.testing.assert_close(logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_inplace_without_rows(target: Target, reduction: str) -> None:
    for empty in (
        torch.zeros(5, device=target.device).expand(0, 5),
        torch.zeros(1, 5, device=target.device).expand(3, 5)[:0],
        torch.zeros(2, 1, 5, device=target.device).expand(2, 4, 5)[:, :0],
        torch.zeros(31, device=target.device).as_strided((2, 0, 1, 31), (0, 31, 0, 1)),
    ):
        leaf = empty.detach().requires_grad_()
        classes = torch.zeros(empty.shape[:-1], dtype=torch.int64, device=target.device)
        loss = xent.cross_entropy(leaf, classes, reduction=reduction, inplace=True, backend=target.name)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        assert grad.shape == empty.shape
        assert float(loss.detach().sum()) == 0
