"""Any strides: transposed, sliced, expanded and padded inputs give the numbers of their contiguous copies."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import xent
from tests.covering import SLOW, crossed
from tests.targets import Target
from xent.backends.torch.contract import Block
from xent.backends.torch.memory import gradient_like

EXACT = {"rtol": 0, "atol": 0}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "one row": lambda t: t[1, 2],
    "one row of a matrix": lambda t: t.flatten(0, 1)[4:5],
    "axes of one": lambda t: t[1:2, 2:3],
    "leading axes swapped": lambda t: t.transpose(0, 1),
    "classes first": lambda t: t.view(-1, 3, 4).movedim(0, -1),
    "classes in the middle": lambda t: t.view(3, -1, 4).movedim(1, -1),
    "fewer classes": lambda t: t[..., :-3],
    "later classes": lambda t: t[..., 3:],
    "every other class": lambda t: t[..., ::2],
    "all but the last token": lambda t: t[:, :-1],
    "all but the first token": lambda t: t[:, 1:],
    "last token": lambda t: t[:, -1:],
    "every other token": lambda t: t[:, ::2],
    "token and classes": lambda t: t[:, :-1, :-2],
    "long rows": lambda t: t.flatten(1)[:, :-1],
    "a token of a wide batch": lambda t: t.view(1, 3, 4, -1)[:, :, 1],
    "four axes": lambda t: t.view(3, 2, 2, -1)[:, :, :1],
    "groups of groups": lambda t: t.view(3, 2, 2, -1)[:, :1, :1],
    "off boundaries": lambda t: t.flatten()[3 : 3 + 2 * t.shape[-1]].view(2, -1),
}
"""Views of a batch (3, 4, V)."""
OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda t: t[:1].expand(5, -1, -1),
    "expanded tokens": lambda t: t[:, :1].expand(-1, 5, -1),
    "sliding window": lambda t: t.flatten().unfold(0, 3, 1)[:2],
    "rows overlap": lambda t: t.as_strided([4, 2, 3], [6, 4, 2]),
    "expanded and permuted": lambda t: t.as_strided([3, 1, 3, 2], [0, 1, 1, 0]),
    "expanded classes": lambda t: t.flatten()[:5].view(5, 1, 1).expand(5, 1, 3),
    "everything is one number": lambda t: t[:1, :1, :1].expand(4, 3, 2),
}
"""Views whose elements share memory."""


def layouts(rows: Tensor) -> set[Any]:
    """Return how Triton's kernels read rows (..., V), alone and to write a gradient in new memory."""
    from xent.backends.triton.geometry import placed

    blocks = [Block(rows), Block(rows, grad=gradient_like(rows))]
    return {(block.grad is None, piece.layout._replace(grouped=False)) for block in blocks for piece in placed(block)}


@pytest.mark.parametrize(
    *crossed(
        view=VIEWS | OVERLAPPING,
        reduction=["mean", "none"],
        dtype=[torch.float32, torch.bfloat16, torch.float16],
        axis=[-1] if SLOW else [-1, 0, 1],
        inplace=[False, True],
    )
)
def test_views(target: Target, view: str, reduction: str, dtype: torch.dtype, axis: int, inplace: bool) -> None:
    """Views have the bits of their contiguous copies. In place, the gradient is written to the view alone.

    Triton sums rows of another layout in another order, for example those that all begin at multiples of 16 bytes.
    """
    torch.manual_seed(0)
    batch = 3 * torch.randn(3, 4, 37, device=target.device).to(dtype)
    before, look = batch.clone(), (VIEWS | OVERLAPPING)[view]
    axis, rows = (axis if look(batch).dim() > axis else -1), list(look(batch).shape)
    classes = torch.randint(rows.pop(axis), rows, device=target.device)
    options = {"reduction": reduction, "axis": axis, "backend": target.name}

    def outcome(logits: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        loss = xent.cross_entropy(leaf, classes, **options, **more).sum()
        return loss.detach(), torch.autograd.grad(1.5 * loss, leaf)[0]

    expected = outcome(look(batch).contiguous())
    eps, rows = torch.finfo(dtype).eps, look(batch).movedim(axis, -1)
    near = {"rtol": (4 if target.name == "triton" else 1) * eps, "atol": 2.0**-24}
    differs = target.name == "triton" and layouts(rows) != layouts(look(batch).contiguous().movedim(axis, -1))
    torch.testing.assert_close(outcome(look(batch)), expected, **(near if differs else EXACT))
    assert torch.equal(batch, before)
    if inplace and view in OVERLAPPING:
        with pytest.raises(ValueError, match="inplace=True needs logits whose elements do not share memory"):
            outcome(look(batch), inplace=True)
    elif inplace:
        # Rounded before and after the factor 1.5.
        torch.testing.assert_close(outcome(look(batch), inplace=True), expected, **near)
        inside = torch.zeros(batch.shape, dtype=torch.bool, device=target.device)
        look(inside).fill_(True)
        assert torch.equal(batch[~inside], before[~inside])


def test_expanded_probabilities(target: Target) -> None:
    torch.manual_seed(0)
    logits, given = torch.randn(3, 4, 19, device=target.device), torch.rand(3, 4, 19, device=target.device)
    for few in (given[:1], given[:, :1], given[:1, :1]):
        found, expected = (
            xent.cross_entropy(logits, change(few), reduction="none", backend=target.name)
            for change in (lambda t: t.expand(3, 4, 19), lambda t: t.expand(3, 4, 19).contiguous())
        )
        assert torch.equal(found, expected)
        teachers = few.log().expand(3, 4, 19), few.log().expand(3, 4, 19).contiguous()
        assert torch.equal(*(xent.divergence(logits, teacher, backend=target.name) for teacher in teachers))


def far_apart(near: Tensor) -> Tensor:
    """Return (3, n) values whose rows are 2^30 elements apart, so that the last offset does not fit in 32 bits.

    On the CPU this is memory of NumPy, which is not initialised: only the pages that are written to exist.
    """
    size = 2**31 + near.shape[1]
    if near.device.type == "cpu":
        memory = torch.from_numpy(np.empty(size, np.int16)).view(near.dtype)
    else:
        memory = torch.empty(size, dtype=near.dtype, device=near.device)
    return memory.as_strided(near.shape, (2**30, 1)).copy_(near)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", ["index", "probabilities", "inplace"])
def test_rows_far_apart(target: Target, kind: str, reduction: str) -> None:
    torch.manual_seed(0)
    vocabulary = (
        5008  # rows begin at multiples of 16 bytes, like those that are far apart, and are summed in the same order
    )
    logits = torch.randn(3, vocabulary, dtype=torch.bfloat16, device=target.device)
    labels = torch.tensor([0, 1, vocabulary - 1], device=target.device)
    if kind == "probabilities":
        labels = torch.rand(3, vocabulary, device=target.device).bfloat16()
    options = {"reduction": reduction, "label_smoothing": 0.1, "inplace": kind == "inplace", "backend": target.name}
    outcome = []
    for change in (torch.clone, far_apart):
        leaf = change(logits).requires_grad_()
        loss = xent.cross_entropy(leaf, change(labels) if labels.dim() > 1 else labels, **options)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        outcome.append((loss.detach(), grad))
    torch.testing.assert_close(*outcome, rtol=0, atol=0)


def test_linear_inputs_far_apart(target: Target) -> None:
    if str(target) == "torch-cuda":
        pytest.skip("cuBLAS 13.0 reads outside of memory in such a product, and ends all work of the process")
    torch.manual_seed(0)
    source, weight = (torch.randn(3, 8, dtype=torch.bfloat16, device=target.device) for _ in range(2))
    classes = torch.tensor([2, 1, 2], device=target.device)
    near, far = (
        xent.linear_cross_entropy(change(source), change(weight), classes, reduction="none", backend=target.name)
        for change in (torch.clone, far_apart)
    )
    torch.testing.assert_close(far, near)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("layout", ["leading axes swapped", "classes first", "classes in the middle"])
def test_gradient_has_the_strides_of_the_logits(target: Target, layout: str, reduction: str) -> None:
    logits = VIEWS[layout](torch.randn(3, 4, 37, device=target.device)).detach().requires_grad_()
    classes = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=target.device)
    loss = xent.cross_entropy(logits, classes, reduction=reduction, backend=target.name).sum()
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.stride() == logits.stride()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("inplace", [False, True])
def test_one_class_whose_stride_is_not_one(target: Target, reduction: str, inplace: bool) -> None:
    source = torch.linspace(1, 2, 5, device=target.device).view(1, 5).requires_grad_()
    logits = (source * 1).t()
    classes = torch.zeros(5, dtype=torch.int64, device=target.device)
    options = {"reduction": reduction, "z_loss": 1.0, "inplace": inplace, "backend": target.name}
    loss = xent.cross_entropy(logits, classes, **options).sum()
    loss.backward()
    torch.testing.assert_close(source.grad, 2 * source.detach() / (5 if reduction == "mean" else 1))
    assert torch.equal(logits, source.t()) != inplace
