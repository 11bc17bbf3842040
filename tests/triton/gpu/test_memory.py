"""Memory on a GPU: no large buffers are held without need."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import xent

MIB = 2**20


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
