"""Any strides: transposed, sliced, expanded and padded inputs give the numbers of their contiguous copies."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import xent
from tests.covering import crossed
from tests.targets import Target
from xent.backends.torch.memory import block_rows

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "leading axes swapped": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "classes first": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "classes in the middle": lambda t: t.movedim(-1, 1).contiguous().movedim(1, -1),
    "padded classes": lambda t: torch.nn.functional.pad(t, (0, 5))[..., : t.shape[-1]],
    "every other class": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "without the last row": lambda t: torch.cat([t, t[:, :1]], 1)[:, :-1],
    "every other row": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "offset": lambda t: torch.cat([t, t])[t.shape[0] :],
}


@pytest.mark.parametrize(
    *crossed(layout=LAYOUTS, reduction=["mean", "none"], dtype=[torch.float32, torch.bfloat16], inplace=[False, True])
)
def test_logits(target: Target, layout: str, reduction: str, dtype: torch.dtype, inplace: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 4, 37, dtype=dtype, device=target.device)
    classes = torch.randint(37, (3, 4), device=target.device)
    upstream = torch.rand(3, 4, device=target.device) if reduction == "none" else None
    outcome = []
    for tensor in (values, LAYOUTS[layout](values)):
        leaf = tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        view = leaf.as_strided(tensor.shape, leaf.stride()) * 1
        loss = xent.cross_entropy(view, classes, reduction=reduction, inplace=inplace, backend=target.name)
        outcome.append((loss, *torch.autograd.grad(loss, leaf, upstream)))
        direct = tensor.detach().requires_grad_()
        loss = xent.cross_entropy(direct, classes, reduction=reduction, backend=target.name)
        outcome.append((loss, *torch.autograd.grad(loss, direct, upstream)))
    for loss, grad in outcome[1:]:
        torch.testing.assert_close(loss, outcome[0][0], rtol=0, atol=0)
        torch.testing.assert_close(grad, outcome[0][1], rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_expanded_logits(target: Target, reduction: str) -> None:
    torch.manual_seed(0)
    row = torch.randn(1, 4, 19, device=target.device)
    classes = torch.randint(19, (3, 4), device=target.device)
    grads = []
    for expand in (lambda t: t.expand(3, 4, 19), lambda t: t.repeat(3, 1, 1)):
        leaf = row.clone().requires_grad_()
        xent.cross_entropy(expand(leaf), classes, reduction=reduction, backend=target.name).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1])


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
    logits = LAYOUTS[layout](torch.randn(3, 4, 37, device=target.device)).requires_grad_()
    classes = torch.zeros(3, 4, dtype=torch.int64, device=target.device)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 6])
def test_hidden_states_without_features(target: Target, dtype: torch.dtype, rows: int) -> None:
    leaves = [torch.zeros(size, dtype=dtype, device=target.device, requires_grad=True) for size in ((rows, 0), (4, 0))]
    classes = torch.zeros(rows, dtype=torch.int64, device=target.device)
    loss = xent.linear_cross_entropy(*leaves, classes, workspace=4 * dtype.itemsize * 2, backend=target.name)
    assert loss.item() == pytest.approx(math.log(4) if rows else 0)
    assert [grad.shape for grad in torch.autograd.grad(loss, leaves)] == [(rows, 0), (4, 0)]


STRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "sliding window": lambda b: b.unfold(0, 3, 1)[:2],
    "rows overlap": lambda b: b.as_strided([4, 2, 3], [6, 4, 2]),
    "expanded and permuted": lambda b: b.as_strided([3, 1, 3, 2], [0, 1, 1, 0]),
    "expanded classes": lambda b: b[:5].view(5, 1, 1).expand(5, 1, 3),
    "everything is one number": lambda b: b[:1].expand(4, 3, 2),
}


@pytest.mark.parametrize(*crossed(strange=STRANGE, axis=[0, 1, -1], reduction=["mean", "none"]))
def test_strange_strides(target: Target, strange: str, axis: int, reduction: str) -> None:
    torch.manual_seed(0)
    base = torch.randn(40, device=target.device)
    before = base.clone()
    view = STRANGE[strange](base)
    rows = list(view.shape)
    rows.pop(axis)
    classes = torch.randint(view.shape[axis], rows, device=target.device)
    outcome = []
    for tensor in (view.detach(), view.contiguous().detach()):
        leaf = tensor.requires_grad_()
        loss = xent.cross_entropy(leaf, classes, axis=axis, reduction=reduction, backend=target.name)
        outcome.append((loss.detach(), *torch.autograd.grad(loss.sum(), leaf)))
    torch.testing.assert_close(*outcome, rtol=0, atol=0)
    assert torch.equal(base, before)


def test_sliding_windows_are_refused_in_place(target: Target) -> None:
    view = torch.randn(40, device=target.device).unfold(0, 3, 1).detach().requires_grad_()
    with pytest.raises(ValueError, match="inplace=True needs logits whose elements do not share memory"):
        xent.cross_entropy(view, torch.zeros(38, dtype=torch.int64, device=target.device), inplace=True)


def test_block_is_at_least_a_row() -> None:
    some = torch.zeros(2, 1000)
    assert block_rows(some, torch.float32) > 100
    assert block_rows(some, torch.float32, 10**9) == 1
