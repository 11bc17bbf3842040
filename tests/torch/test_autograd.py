"""Autograd: gradients exist where they are required, again with a retained graph, and second derivatives raise."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import xent
from tests.targets import Target

REDUCTIONS = ("mean", "sum", "none")


def linear_loss(tensors: dict[str, Tensor], target: Target, **options: Any) -> Tensor:
    loss = xent.linear_cross_entropy(
        tensors["input"],
        tensors["linear_weight"],
        tensors["target"],
        linear_bias=tensors["linear_bias"],
        backend=target.name,
        **options,
    )
    return loss.sum()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_backward_in_place(target: Target, tensors: dict[str, Tensor], reduction: str) -> None:
    logits = tensors["linear_weight"].requires_grad_()
    classes = torch.arange(11, device=target.device) % 8
    loss = xent.cross_entropy(logits * 1, classes, reduction=reduction, inplace=True, backend=target.name)
    upstream = torch.rand_like(loss)
    passes = [torch.autograd.grad(loss, logits, upstream, retain_graph=True)[0] for _ in range(2)]
    torch.testing.assert_close(passes[0], passes[1], rtol=0, atol=0)
    (last,) = torch.autograd.grad(loss, logits, upstream)
    torch.testing.assert_close(passes[0], last, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("how", ["penalty", "loss and penalty", "graph not retained"])
def test_second_derivative_raises_if_the_upstream_gradient_is_differentiable(
    target: Target, tensors: dict[str, Tensor], reduction: str, inplace: bool, how: str
) -> None:
    """The derivative of a squared loss depends on the logits through the loss too, which is differentiable."""
    source = tensors["input"].requires_grad_()
    options = {"reduction": reduction, "inplace": inplace, "backend": target.name}
    loss = xent.cross_entropy(source * 1, tensors["target"] % 8, **options).square().sum()
    (first,) = torch.autograd.grad(loss, source, create_graph=True, retain_graph=how != "graph not retained")
    penalty = first.square().sum()
    total = penalty + loss if how == "loss and penalty" else penalty
    with pytest.raises(RuntimeError, match="xent computes no second derivatives"):
        total.backward() if how == "penalty" else torch.autograd.grad(total, source)


@pytest.mark.parametrize("factor", [1.0, -2.5, 65536.0, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("retain", [False, True])
def test_upstream_scalar_is_not_rounded(target: Target, factor: float, dtype: torch.dtype, retain: bool) -> None:
    logits = torch.randn(8, 30, device=target.device).to(dtype).requires_grad_()
    classes = torch.arange(8, device=target.device)
    (unit,) = torch.autograd.grad(xent.cross_entropy(logits, classes, reduction="sum", backend=target.name), logits)
    loss = xent.cross_entropy(logits, classes, reduction="sum", backend=target.name)
    (scaled,) = torch.autograd.grad(loss * factor, logits, retain_graph=retain)
    expected = (unit.double() * torch.tensor(factor, dtype=torch.float32).double()).to(dtype)
    torch.testing.assert_close(scaled, expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("retain", [False, True])
def test_float16_gradients_do_not_underflow_before_the_loss_scale(target: Target, retain: bool) -> None:
    """A mean over many tokens has gradients too small for float16, but a loss scale must still help."""
    rows, scale = 512, 2.0**16
    logits = torch.randn(rows, 300, device=target.device, dtype=torch.float16).requires_grad_()
    classes = torch.randint(300, (rows,), device=target.device)
    loss = xent.cross_entropy(logits, classes, backend=target.name) * scale
    (found,) = torch.autograd.grad(loss, logits, retain_graph=retain)
    wide = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(wide, classes) * scale, wide)
    assert (found.double() - expected).norm() / expected.norm() < 1e-3
    small = expected.abs() < 1e-2
    assert (found.double() - expected)[small].norm() / expected[small].norm() < 1e-2


def test_weights_that_require_a_gradient_are_taken_under_no_grad(target: Target) -> None:
    weight, classes = torch.ones(3, device=target.device, requires_grad=True), torch.arange(3, device=target.device)
    with torch.no_grad():
        assert xent.cross_entropy(weight.diag(), classes, sample_weight=weight, weight=weight).isfinite()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_do_not_keep_the_graph_alive(
    target: Target, tensors: dict[str, Tensor], reduction: str, retain: bool, inplace: bool
) -> None:
    asking = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in tensors.items()}
    logits = asking["input"] * 1
    loss = linear_loss(asking, target, reduction=reduction)
    options = {"reduction": reduction, "inplace": inplace, "backend": target.name}
    loss = loss + xent.cross_entropy(logits, tensors["target"] % 8, **options).sum()
    leaves = [asking["input"], asking["linear_weight"], logits]
    for gradient in torch.autograd.grad(loss, leaves, retain_graph=retain):
        assert not gradient.requires_grad


def test_float16_gradient_of_a_bias_does_not_overflow(target: Target) -> None:
    """The z-loss gives gradients of 3466 in every row.

    The sum of 32 of them overflows in float16, but not their mean.
    """
    hidden, weight = (torch.zeros(32, 4, dtype=torch.float16, device=target.device) for _ in range(2))
    bias = torch.zeros(32, dtype=torch.float16, device=target.device, requires_grad=True)
    classes = torch.arange(32, device=target.device)
    loss = xent.linear_cross_entropy(hidden, weight, classes, linear_bias=bias, z_loss=16e3, backend=target.name)
    (gradient,) = torch.autograd.grad(loss, bias)
    expected = 2 * 16e3 * math.log(32) / 32
    torch.testing.assert_close(gradient.float(), torch.full_like(bias, expected).float(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("sizes", [(1e5, 1e5), (1e-9, 1e-9), (-1e5, 1.0)])
@pytest.mark.parametrize("name", ["weight", "sample_weight"])
def test_float16_mean_does_not_depend_on_the_size_of_row_weights(
    target: Target, sizes: tuple[float, ...], name: str
) -> None:
    logits = torch.zeros(2, 4, dtype=torch.float16, device=target.device, requires_grad=True)
    weights = torch.tensor((*sizes, 1.0, 1.0) if name == "weight" else sizes, device=target.device)
    classes = torch.tensor([0, 1], device=target.device)
    loss = xent.cross_entropy(logits, classes, backend=target.name, **{name: weights})
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = torch.tensor([-0.75, 0.25, 0.25, 0.25], device=target.device) * sizes[0] / sum(sizes)
    torch.testing.assert_close(gradient[0], expected.half())


class NoGradient(torch.autograd.Function):
    """A copy whose backward pass returns None."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> None:
        return None


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("inplace", [False, True])
def test_without_upstream_gradient_there_is_no_gradient(
    target: Target, tensors: dict[str, Tensor], reduction: str, inplace: bool
) -> None:
    asking = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in tensors.items()}
    options = {"reduction": reduction, "backend": target.name}
    logits_loss = xent.cross_entropy(asking["input"] * 1, tensors["target"] % 8, inplace=inplace, **options)
    for loss in (logits_loss, linear_loss(asking, target, reduction=reduction)):
        NoGradient.apply(loss).sum().backward()
    assert all(tensor.grad is None for tensor in asking.values())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("call", ["mean", "none", "none inplace", "log_probs", "linear none"])
def test_checkpoints(target: Target, call: str, reentrant: bool, watched: bool, dtype: str) -> None:
    """Also with a default device, a mode for which calls go through the custom operations."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(6, 24, generator=generator), torch.randn(11, 24, generator=generator) / 5
    logits, hidden, weight = (each.to(getattr(torch, dtype)) for each in (drawn[0][:, :11], *drawn))
    source, weight = (each.to(target.device) for each in (hidden if "linear" in call else logits, weight))
    classes = torch.randint(11, (6,), generator=generator).to(target.device)

    def loss(source: Tensor) -> Tensor:
        options = {"backend": target.name}
        if call == "log_probs":
            return xent.log_probs(source, classes, **options).sum()
        if call == "linear none":
            return xent.linear_cross_entropy(source, weight, classes, reduction="none", **options).sum()
        name, inplace = call.split()[0], call.endswith("inplace")
        return xent.cross_entropy(source * 1, classes, reduction=name, inplace=inplace, **options).sum()

    gradients = []
    for wrapped in (False, True):
        (leaf,) = [source.clone().requires_grad_()]
        with torch.device(target.device) if wrapped and watched else nullcontext():
            made = checkpoint(loss, leaf, use_reentrant=reentrant) if wrapped else loss(leaf)
            made.backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("vocabulary", [11, 4096])
@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
def test_losses_of_rows_can_be_written_to(target: Target, function: str, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(6, 8, generator=generator), torch.randn(vocabulary, 8, generator=generator)
    leaves = [drawn[0] @ drawn[1].t()] if function == "cross_entropy" else list(drawn)
    leaves = [leaf.to(target.device).requires_grad_() for leaf in leaves]
    classes = torch.randint(vocabulary, (6,), generator=generator).to(target.device)
    mask = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0, 3.0], device=target.device)

    def losses() -> Tensor:
        return getattr(xent, function)(*leaves, classes, reduction="none", backend=target.name)

    written = losses()
    written *= mask
    gradients = [torch.autograd.grad(made.sum(), leaves) for made in (written, losses() * mask)]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
