"""Work and memory on a GPU: ignored rows are not multiplied, and no large buffers are held without need."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.torch.products import flops_of

N, D, V = 64, 16, 40
PRODUCT = 2 * N * D * V
MIB = 2**20


def flops(needs: tuple[bool, bool, bool], reduction: str = "mean", ignored: float = 0.0) -> int:
    """Count the multiplications and additions of matrix products, forward and (for "none") backward."""
    torch.manual_seed(0)
    target = torch.randint(V, (N,), device="cuda")
    target[: int(ignored * N)] = -100
    leaves = [torch.randn(size, device="cuda") for size in ((N, D), (V, D), (V,))]
    options: dict[str, Any] = {"reduction": reduction, "workspace": V * 4 * 10, "backend": "triton"}

    def call() -> None:
        given = [leaf.requires_grad_(need) for leaf, need in zip(leaves, needs, strict=True)]
        bias = given[2] if needs[2] else None
        loss = xent.linear_cross_entropy(*given[:2], target, linear_bias=bias, **options)
        if any(needs):
            loss.backward(torch.ones_like(loss))

    call()  # what is found out once is no work of a call
    return flops_of(call)


@pytest.mark.parametrize(
    ("needs", "products"), [((True, True, True), 3), ((True, False, False), 2), ((False, True, False), 2)]
)
def test_ignored_rows_are_not_multiplied(needs: tuple[bool, bool, bool], products: int) -> None:
    assert flops(needs) == products * PRODUCT
    assert flops(needs, ignored=0.75) == products * PRODUCT // 4
    # The first chunk starts before it is known whether any row must be computed.
    assert flops(needs, ignored=1.0) <= products * PRODUCT // 6


def test_ignored_rows_are_not_multiplied_again() -> None:
    """The forward pass of "none" computes all rows.

    Its backward pass computes only the logits of rows with a gradient.
    """
    assert flops((True, True, False), "none") == 4 * PRODUCT
    assert flops((True, True, False), "none", ignored=0.75) <= PRODUCT + 3 * PRODUCT // 4


def test_nothing_requires_a_gradient() -> None:
    assert flops((False, False, False)) == PRODUCT


def peak(call: Callable[[], Any]) -> int:
    """Return the peak bytes above those before the call, measured in the second call."""
    for _ in range(2):
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = call()
        used = torch.cuda.max_memory_allocated() - before
        del kept
    return used


def draw(rows: int, hidden: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(vocabulary, (rows,), device="cuda")
    target[::3] = -100
    return source, weight, target


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"label_smoothing": 0.1, "softcap": 30.0}], ids=str)
def test_linear_memory_is_workspace_and_gradients(chunks: int, options: dict[str, Any]) -> None:
    rows, hidden, vocabulary = 4096, 256, 64_000
    source, weight, target = draw(rows, hidden, vocabulary)
    workspace = rows // chunks * vocabulary * 2
    leaves = [source.requires_grad_(), weight.requires_grad_()]

    def call() -> Any:
        loss = xent.linear_cross_entropy(*leaves, target, workspace=workspace, backend="triton", **options)
        return torch.autograd.grad(loss.sum(), leaves)

    gradients = (rows + vocabulary) * hidden * 2
    assert gradients + workspace / 2 < peak(call) <= workspace + gradients + 6 * MIB


def test_linear_of_a_frozen_classifier() -> None:
    source, weight, target = draw(2048, 256, 64_000)
    source.requires_grad_()
    workspace = 512 * 64_000 * 2

    def call() -> Any:
        loss = xent.linear_cross_entropy(source, weight, target, workspace=workspace, backend="triton")
        return torch.autograd.grad(loss, source)

    assert peak(call) <= workspace + 6 * MIB


def test_linear_memory_without_gradients_is_a_tile() -> None:
    source, weight, target = draw(8192, 256, 64_000)
    assert peak(lambda: xent.linear_cross_entropy(source, weight, target, backend="triton")) <= 36 * MIB
    assert peak(lambda: xent.linear_cross_entropy(source, weight, target, workspace=MIB, backend="triton")) <= 4 * MIB


def test_logits() -> None:
    rows, vocabulary = 2048, 64_000
    size = rows * vocabulary * 2
    logits = torch.randn(rows, vocabulary, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocabulary, (rows,), device="cuda")

    def call(**options: Any) -> Any:
        loss = xent.cross_entropy(logits, target, backend="triton", **options)
        return torch.autograd.grad(loss.sum() * 2, logits)

    for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4}):
        assert size <= peak(lambda options=options: call(**options)) <= size + MIB
        assert peak(lambda options=options: call(inplace=True, **options)) <= MIB
        with torch.no_grad():
            assert peak(lambda options=options: xent.cross_entropy(logits, target, **options)) <= MIB
