"""Eager calls: saved-tensor hooks, retained graphs, views, ended transforms, autocast, inference mode and memory."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import xent
from tests.targets import Target

REDUCTIONS = ("mean", "none")
each_loss = pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])


class Watching(TorchDispatchMode):
    """A mode that sees all operations, under which calls take the way of compiled graphs."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def draw(target: Target, function: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Return leaves and classes."""
    torch.manual_seed(0)
    shapes = [(5, 11)] if function == "cross_entropy" else [(5, 8), (11, 8)]
    leaves = [torch.randn(shape, device=target.device).to(dtype).requires_grad_() for shape in shapes]
    return leaves, torch.tensor([0, 3, -100, 10, 7], device=target.device)


def loss_of(target: Target, function: str, leaves: list[Tensor], classes: Tensor, **options: Any) -> Tensor:
    return getattr(xent, function)(*leaves, classes, backend=target.name, **options)


@each_loss
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_results_equal_the_custom_operations(target: Target, function: str, reduction: str, dtype: torch.dtype) -> None:
    leaves, classes = draw(target, function, dtype)
    outcome = []
    for mode in (None, Watching()):
        with mode or torch.enable_grad():
            loss = loss_of(target, function, leaves, classes, reduction=reduction, z_loss=0.1)
            outcome.append([loss, *torch.autograd.grad(loss, leaves, 0.5 * torch.ones_like(loss))])
    for one, other in zip(*outcome, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@each_loss
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"probabilities": True}], ids=str)
def test_custom_operations_of_any_number_of_classes(
    target: Target, function: str, reduction: str, options: dict[str, Any]
) -> None:
    """Calls in one mode with the same dtypes and other sizes of every axis."""
    torch.manual_seed(0)
    call_options = {name: value for name, value in options.items() if name != "probabilities"}
    for rows, width, vocabulary in ((3, 8, 104), (2, 24, 3000), (3, 8, 40)):
        shapes = [(rows, vocabulary)] if function == "cross_entropy" else [(rows, width), (vocabulary, width)]
        leaves = [torch.randn(shape, device=target.device).requires_grad_() for shape in shapes]
        classes = torch.randint(vocabulary, (rows,), device=target.device)
        if "probabilities" in options:
            classes = torch.rand(rows, vocabulary, device=target.device)
        results = []
        for mode in (None, Watching()):
            with mode or torch.enable_grad():
                loss = loss_of(target, function, leaves, classes, reduction=reduction, **call_options)
            results.append([loss, *torch.autograd.grad(loss, leaves, torch.ones_like(loss))])
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("option", ["normalizer", "sample_weight"])
def test_custom_operation_of_a_top_k_teacher_and_a_tensor_without_axes(target: Target, option: str) -> None:
    logits, ids = torch.randn(3, 8, device=target.device), torch.tensor([[0, 1]], device=target.device)
    log_probs, number = torch.full((1, 2), -1.2, device=target.device), torch.tensor(0.7, device=target.device)
    if option == "sample_weight":
        logits, ids, log_probs = logits[0], ids[0], log_probs[0]
    else:
        ids, log_probs = ids.expand(3, 2), log_probs.expand(3, 2)
    teacher, losses = xent.TopKTeacher(ids, log_probs), []
    for mode in (None, Watching()):
        with mode or torch.enable_grad():
            losses.append(xent.divergence(logits, teacher, backend=target.name, **{option: number}))
    assert torch.equal(*losses)


@each_loss
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hooks_see_all_saved_tensors(target: Target, function: str, reduction: str, dtype: torch.dtype) -> None:
    """The unpacked tensors are used, which hooks may have moved to other memory or to disk."""
    leaves, classes = draw(target, function, dtype)
    options = {"reduction": reduction, "sample_weight": torch.rand(5, device=target.device)}
    loss = loss_of(target, function, leaves, classes, **options)
    expected = torch.autograd.grad(loss, leaves, torch.ones_like(loss))
    kept = []

    def pack(tensor: Tensor) -> int:
        kept.append(tensor.detach().clone())
        return len(kept) - 1

    copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: kept[index]):
        loss = loss_of(target, function, copies, classes, **options)
    assert kept
    with torch.no_grad():
        for copy in copies:
            copy.copy_(torch.full_like(copy, torch.nan))  # the original must not be read again
    found = torch.autograd.grad(loss, copies, torch.ones_like(loss))
    assert all(map(torch.equal, found, expected))


@each_loss
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_graph_is_freed_after_backward(target: Target, function: str, reduction: str) -> None:
    leaves, classes = draw(target, function)
    loss = loss_of(target, function, leaves, classes, reduction=reduction)
    upstream = torch.ones_like(loss)
    torch.autograd.grad(loss, leaves, upstream)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves, upstream)


@each_loss
def test_gradient_with_a_retained_graph_is_another_tensor(target: Target, function: str) -> None:
    leaves, classes = draw(target, function)
    loss = loss_of(target, function, leaves, classes)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for grad in first:
        grad.zero_()
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(grad.abs().sum() > 0 for grad in second)
    copies = [grad.clone() for grad in second]
    torch.autograd.grad(3 * loss, leaves)
    assert all(map(torch.equal, second, copies))


UPSTREAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "negative bit": lambda u: torch._neg_view(-u),
    "negative bit of an imaginary part": lambda u: torch.complex(torch.zeros_like(u), -u).conj().imag,
    "expanded": lambda u: u.flatten()[:1].expand(u.shape) if u.dim() else u,
    "every other": lambda u: torch.stack([u, u], -1)[..., 0],
    "a parameter": lambda u: torch.nn.Parameter(u, requires_grad=False),
}


@each_loss
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", UPSTREAMS)
def test_upstream_gradients_that_are_views(target: Target, function: str, reduction: str, kind: str) -> None:
    leaves, classes = draw(target, function)
    loss = loss_of(target, function, leaves, classes, reduction=reduction)
    upstream = UPSTREAMS[kind](torch.full_like(loss, 2.5))
    plain = torch.full_like(loss, 2.5)
    assert torch.equal(upstream, plain)
    expected = torch.autograd.grad(loss, leaves, plain, retain_graph=True)
    for keep in (True, False):
        for one, other in zip(torch.autograd.grad(loss, leaves, upstream, retain_graph=keep), expected, strict=True):
            assert not one.is_neg()
            assert torch.equal(one, other)


@each_loss
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_tensors_of_an_ended_transform(target: Target, function: str, reduction: str) -> None:
    leaves, classes = draw(target, function)
    kept = []

    def keep(*wrapped: Tensor) -> Tensor:
        kept.extend(wrapped)
        return torch.stack([one.sum() for one in wrapped]).sum()

    torch.func.grad(keep, argnums=tuple(range(len(leaves))))(*leaves)
    found, expected = (
        torch.autograd.grad(loss_of(target, function, tensors, classes, reduction=reduction).sum(), leaves)
        for tensors in (kept, leaves)
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("argument", ["logits", "sample_weight"])
def test_arguments_with_a_negative_bit(target: Target, argument: str) -> None:
    logits, sample = torch.randn(5, 11, device=target.device), torch.rand(5, device=target.device)
    classes = torch.arange(5, device=target.device)
    found, expected = (
        xent.cross_entropy(
            turned if argument == "logits" else logits,
            classes,
            sample_weight=turned if argument == "sample_weight" else sample,
            backend=target.name,
        )
        for value in [logits if argument == "logits" else sample]
        for turned in (torch._neg_view(-value), value)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_autocast_does_not_change_float32_logits(target: Target, reduction: str, where: str) -> None:
    leaves, classes = draw(target, "cross_entropy")
    outcome = []
    for kinds in ("", where):
        with torch.autocast(target.device, torch.bfloat16, enabled=kinds in ("forward", "both")):
            loss = loss_of(target, "cross_entropy", leaves, classes, reduction=reduction)
        with torch.autocast(target.device, torch.bfloat16, enabled=kinds in ("backward", "both")):
            outcome.append((loss, *torch.autograd.grad(loss, leaves, torch.ones_like(loss))))
    assert all(map(torch.equal, *outcome))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("wide", [(0,), (1,), (2,), (0, 1, 2), ()], ids=str)
def test_autocast_converts_each_factor(target: Target, reduction: str, wide: tuple[int, ...]) -> None:
    """`wide`: which of hidden states, classifier and bias are float32, the others have the dtype of autocast."""
    torch.manual_seed(0)
    drawn = [torch.randn(shape, device=target.device) for shape in ((5, 8), (11, 8), (11,))]
    classes = torch.tensor([0, 3, -100, 10, 7], device=target.device)

    def outcome(wide: tuple[int, ...]) -> list[Tensor]:
        leaves = [
            (leaf if index in wide else leaf.bfloat16()).requires_grad_()
            for index, leaf in enumerate(leaf.bfloat16().float() for leaf in drawn)
        ]
        with torch.autocast(target.device, torch.bfloat16):
            loss = xent.linear_cross_entropy(
                *leaves[:2], classes, linear_bias=leaves[2], reduction=reduction, backend=target.name
            )
        gradients = torch.autograd.grad(loss, leaves, torch.ones_like(loss))
        assert [gradient.dtype for gradient in gradients] == [leaf.dtype for leaf in leaves]
        return [loss.detach(), *(gradient.float() for gradient in gradients)]

    torch.testing.assert_close(outcome(wide), outcome(()), rtol=2.0**-7, atol=2.0**-8)


@each_loss
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_tensors_of_inference_mode(target: Target, function: str, reduction: str) -> None:
    leaves, classes = draw(target, function)
    expected = loss_of(target, function, leaves, classes, reduction=reduction).detach()
    with torch.inference_mode():
        copies = [leaf.clone() for leaf in leaves]
        inside = loss_of(target, function, copies, classes.clone(), reduction=reduction)
    outside = loss_of(target, function, copies, classes, reduction=reduction)
    assert torch.equal(outside, expected)
    with torch.inference_mode():
        torch.testing.assert_close(inside, expected)


@each_loss
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("end", ["loss dropped", "backward"])
def test_memory_is_freed_without_the_garbage_collector(target: Target, function: str, reduction: str, end: str) -> None:
    """What a call saved is not part of a reference cycle."""
    leaves, classes = draw(target, function)
    gc.disable()
    try:
        sources = [leaf * 1 for leaf in leaves]
        weights = {
            name: torch.ones(size, device=target.device) for name, size in (("weight", 11), ("sample_weight", 5))
        }
        held = [weakref.ref(one) for one in (*sources, *weights.values())]
        loss = loss_of(target, function, sources, classes, reduction=reduction, **weights)
        del sources, weights
        if end == "backward":
            torch.autograd.grad(loss, leaves, torch.ones_like(loss))
        else:
            del loss
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()
