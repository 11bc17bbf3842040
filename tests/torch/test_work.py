"""Memory and host work in PyTorch: unneeded memory is not kept, and sums over chunks are rounded once."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import xent
from tests.torch.peak import peak

N, D, V = 64, 16, 40


def test_sums_over_chunks_are_rounded_once() -> None:
    """In bfloat16, gradients summed over 16 chunks are as exact as those of one product."""
    torch.manual_seed(0)
    x, w, b = torch.randn(N, D).bfloat16(), torch.randn(V, D).bfloat16(), torch.randn(V).bfloat16()
    y = torch.randint(V, (N,))

    def gradients(workspace: int | None, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
        loss = xent.linear_cross_entropy(x.to(leaves[0]), leaves[0], y, linear_bias=leaves[1], workspace=workspace)
        return torch.autograd.grad(loss, leaves)

    truth = gradients(None, w.double(), b.double())
    for whole, chunked, true in zip(gradients(None, w, b), gradients(V * 2 * 4, w, b), truth, strict=True):
        assert (chunked - true).norm() <= 1.15 * (whole - true).norm()


def calls_of(function: Callable[[], Any]) -> int:
    """Count the calls of Python functions and of functions in C."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    function()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


LAYOUTS: dict[str, tuple[Callable[[int], Tensor], int]] = {
    "axis 1": (lambda n: torch.randn(n, 3, 2), 1),
    "all but the last token": (lambda n: torch.randn(n, 3, 2)[:, :-1], -1),
    "all but the first class": (lambda n: torch.randn(n, 3, 4)[..., 1:], -1),
    "transposed": (lambda n: torch.randn(2, 3, n).permute(2, 1, 0), 1),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_of_python_do_not_grow_with_the_batch(layout: str, reduction: str) -> None:
    make, axis = LAYOUTS[layout]
    counts = []
    for number in (20, 20_000):
        logits = make(number).requires_grad_()
        rows = list(logits.shape)
        rows.pop(axis)
        target = torch.zeros(rows, dtype=torch.int64)

        def call(logits: Tensor = logits, target: Tensor = target) -> None:
            loss = xent.cross_entropy(logits, target, axis=axis, reduction=reduction, backend="torch")
            torch.autograd.grad(loss.sum(), logits)

        counts.append(calls_of(call))
    assert counts[1] <= counts[0] + 300, counts


def test_bfloat16_gradient_of_a_classifier_in_64_chunks() -> None:
    torch.manual_seed(0)
    rows, width, vocabulary = 512, 64, 1000
    x, w = torch.randn(rows, width).bfloat16(), (torch.randn(vocabulary, width) / 8).bfloat16().requires_grad_()
    target = torch.randint(vocabulary, (rows,))
    wide = w.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(F.cross_entropy(x.double() @ wide.t(), target), wide)
    (plain,) = torch.autograd.grad(F.cross_entropy(F.linear(x, w).float(), target), w)
    chunked = xent.linear_cross_entropy(x, w, target, workspace=rows // 64 * vocabulary * 2, backend="torch")
    (found,) = torch.autograd.grad(chunked, w)
    assert (found.double() - truth).norm() <= 1.5 * (plain.double() - truth).norm()


LOGITS = "x = torch.randn(1024, 32000).requires_grad_(); y = torch.randint(32000, (1024,))"
SIZE = 1024 * 32000 * 4


def test_memory_of_logits_is_their_gradient() -> None:
    assert peak(LOGITS, "xent.cross_entropy(x, y).backward()") <= 1.1 * SIZE
    inside = f"{LOGITS}; h = x + 0"
    assert peak(inside, "xent.cross_entropy(h, y).backward()") <= 1.1 * SIZE
    assert peak(inside, "xent.cross_entropy(h, y, inplace=True).backward()") <= 0.1 * SIZE
    assert peak(LOGITS, "xent.cross_entropy(x, y, inplace=True).backward()") <= 0.1 * SIZE
    assert peak(LOGITS, "(xent.cross_entropy(x, y) * 0.5).backward()") <= 1.1 * SIZE
    assert peak(LOGITS, "xent.cross_entropy(x, y, reduction='none').sum().backward()") <= 1.1 * SIZE
    classes_first = "x = torch.randn(32000, 1024).requires_grad_(); y = torch.randint(32000, (1024,))"
    assert peak(classes_first, "xent.cross_entropy(x, y, axis=0).backward()") <= 1.1 * SIZE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_retained_graph_costs_one_gradient_in_its_dtype(dtype: str) -> None:
    setup = f"x = torch.randn(1024, 32000, dtype=torch.{dtype}).requires_grad_(); y = torch.randint(32000, (1024,))"
    size = 1024 * 32000 * (4 if dtype == "float32" else 2)
    assert peak(setup, "xent.cross_entropy(x, y).backward(retain_graph=True)") <= 2.1 * size


def test_retained_graph_needs_no_float32_gradient() -> None:
    """One gradient is saved and one is returned. In float32 the second would take twice the memory."""
    setup = LOGITS.replace("32000)", "32000).bfloat16()", 1)
    call = "torch.autograd.grad(xent.cross_entropy(x, y) * 0.5, x, retain_graph=True)"
    assert peak(setup, call) <= 2.2 * SIZE / 2


def test_logits_without_gradient_need_little_memory() -> None:
    for call in (
        "xent.cross_entropy(x, y)",
        "xent.cross_entropy(x, y, softcap=30.0, label_smoothing=0.1, z_loss=1e-4)",
    ):
        assert peak(LOGITS, f"with torch.no_grad(): {call}") <= 0.1 * SIZE


@pytest.mark.parametrize("options", ["", ", reduction='none'", ", label_smoothing=0.1, softcap=30.0"])
def test_linear_memory_is_flat_in_tokens(options: str) -> None:
    workspace, vocabulary, width = 16 * 2**20, 16000, 64
    used = []
    for tokens in (1024, 4096):
        setup = "; ".join(
            [
                f"x = torch.randn({tokens}, {width}).requires_grad_()",
                f"w = torch.randn({vocabulary}, {width}).requires_grad_()",
                f"y = torch.randint({vocabulary}, ({tokens},))",
            ]
        )
        call = f"xent.linear_cross_entropy(x, w, y, workspace={workspace}{options}).sum().backward()"
        used.append(peak(setup, call) - (tokens + vocabulary) * width * 4)
    assert max(used) <= workspace + 24 * 2**20
    assert used[1] - used[0] <= 8 * 2**20


def test_bfloat16_gradient_of_one_chunk_is_computed_in_its_final_memory() -> None:
    setup = """
x, w = torch.randn(64, 512).bfloat16(), torch.randn(64000, 512).bfloat16().requires_grad_()
y = torch.randint(64000, (64,)); y[:9] = -100
"""
    # On processors without bfloat16 instructions, the library allocates memory itself to compute logits.
    library = peak(setup, "x @ w.detach().t()") - 64 * 64000 * 2
    assert peak(setup, "xent.linear_cross_entropy(x, w, y).backward()") <= 1.5 * 64000 * 512 * 2 + library


def test_frozen_classifier_costs_no_memory_for_its_gradient() -> None:
    setup = "x = torch.randn(64, 512).requires_grad_(); w = torch.randn(64000, 512); y = torch.randint(64000, (64,))"
    call = "xent.linear_cross_entropy(x, w, y, workspace=2**22).backward()"
    assert peak(setup, call) <= 0.3 * 64000 * 512 * 4
    assert 1.0 <= peak(setup, f"w.requires_grad_(); {call}") / (64000 * 512 * 4) <= 1.3


@pytest.mark.parametrize("options", ["", ", head_weight=(1.0, 0.5, 0.3, 0.1)", ", reduction='none'"])
def test_four_heads_hold_one_gradient_of_the_classifier(options: str) -> None:
    """Four separate calls would hold four gradients of 62.5 MiB."""
    setup = """
x, w = torch.randn(4, 64, 512).requires_grad_(), torch.randn(32000, 512).requires_grad_()
y = torch.randint(32000, (64,))
"""
    call = f"xent.linear_cross_entropy(x, w, y, shift=(1, 2, 3, 4){options}).sum().backward()"
    assert peak(setup, call) <= 130 * 2**20
