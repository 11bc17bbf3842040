"""Memory and host work in PyTorch: unneeded memory is not kept, and sums over chunks are rounded once."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import xent
from tests.torch.peak import peaks

N, D, V = 64, 16, 40


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


def test_backward_pass_of_a_linear_loss_allocates_one_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradient takes the same memory."""
    x, w = torch.randn(N, D).requires_grad_(), torch.randn(V, D).requires_grad_()
    loss = xent.linear_cross_entropy(x, w, torch.arange(N) % V, reduction="none", backend="torch")
    sizes, empty = [], torch.empty

    def allocated(*size: Any, **options: Any) -> Tensor:
        sizes.append(empty(*size, **options).numel())
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", allocated)
    loss.sum().backward()
    assert sizes.count(N * V) == 1, sizes


MIB = 2**20
ROWS, CLASSES = 512, 32000
LOGITS = f"x = torch.randn({ROWS}, {CLASSES}).requires_grad_(); y = torch.randint({CLASSES}, ({ROWS},))"
CLASSES_FIRST = f"x = torch.randn({CLASSES}, {2 * ROWS}).requires_grad_(); y = torch.randint({CLASSES}, ({2 * ROWS},))"
INSIDE = f"{LOGITS}; h = x + 0"
RETAINED = "xent.cross_entropy(x, y).backward(retain_graph=True)"
NARROW = LOGITS.replace("32000)", "32000).{}()", 1)
PEAKS: list[tuple[str, str, int]] = [
    (LOGITS, "xent.cross_entropy(x, y).backward()", 1),
    (INSIDE, "xent.cross_entropy(h, y).backward()", 1),
    (INSIDE, "xent.cross_entropy(h, y, inplace=True).backward()", 0),
    (LOGITS, "xent.cross_entropy(x, y, inplace=True).backward()", 0),
    (LOGITS, "(xent.cross_entropy(x, y) * 0.5).backward()", 1),
    (LOGITS, "xent.cross_entropy(x, y, reduction='none').sum().backward()", 1),
    (CLASSES_FIRST, "xent.cross_entropy(x, y, axis=0).backward()", 2),
    (LOGITS, "with torch.no_grad(): xent.cross_entropy(x, y)", 0),
    (LOGITS, "with torch.no_grad(): xent.cross_entropy(x, y, softcap=30.0, label_smoothing=0.1, z_loss=1e-4)", 0),
    # A retained graph has one gradient that is saved and one that is returned, in the dtype of the logits.
    (LOGITS, RETAINED, 2),
    (NARROW.format("bfloat16"), RETAINED, 1),
    (NARROW.format("half"), RETAINED, 1),
    (NARROW.format("bfloat16"), "torch.autograd.grad(xent.cross_entropy(x, y) * 0.5, x, retain_graph=True)", 1),
]
"""(setup, call, how often the call holds the memory of float32 logits)"""


def test_memory_of_logits_is_their_gradient() -> None:
    used = peaks(*((setup, call) for setup, call, _ in PEAKS))
    for (setup, call, times), found in zip(PEAKS, used, strict=True):
        assert found <= times * ROWS * CLASSES * 4 + 12 * MIB, (setup, call)


def test_linear_memory_is_flat_in_tokens() -> None:
    workspace, vocabulary, width = 16 * MIB, 16000, 64
    call = f"xent.linear_cross_entropy(x, w, y, workspace={workspace}{{}}).sum().backward()"
    calls = [call.format(more) for more in ("", ", reduction='none'", ", label_smoothing=0.1, softcap=30.0")]
    few, many = ([(linear(tokens, width, vocabulary), one) for one in calls] for tokens in (1024, 4096))
    used = peaks(*few, *many)
    for name, small, large in zip(calls, used[:3], used[3:], strict=True):
        small, large = small - (1024 + vocabulary) * width * 4, large - (4096 + vocabulary) * width * 4
        assert max(small, large) <= workspace + 24 * MIB, name
        assert large - small <= 8 * MIB, name


def linear(tokens: int, width: int, vocabulary: int) -> str:
    return f"""
x, w = torch.randn({tokens}, {width}).requires_grad_(), torch.randn({vocabulary}, {width}).requires_grad_()
y = torch.randint({vocabulary}, ({tokens},))"""


def test_gradients_of_the_classifier() -> None:
    """One that is frozen costs nothing. One of a single chunk is computed in its final memory, one of heads once."""
    frozen, size = f"{linear(64, 512, 32000)}; w.requires_grad_(False)", 32000 * 512 * 4
    narrow = (
        f"{linear(64, 512, 32000)}; x, w = x.detach().bfloat16(), w.detach().bfloat16().requires_grad_(); y[:9] = -100"
    )
    heads = f"{linear(64, 512, 32000)}; x = torch.randn(4, 64, 512).requires_grad_()"
    head = "xent.linear_cross_entropy(x, w, y, shift=(1, 2, 3, 4){}).sum().backward()"
    calls = [
        (frozen, "xent.linear_cross_entropy(x, w, y, workspace=2**21).backward()"),
        (frozen, "w.requires_grad_(); xent.linear_cross_entropy(x, w, y, workspace=2**21).backward()"),
        # On processors without bfloat16 instructions, the library allocates memory itself to compute logits.
        (narrow, "x @ w.detach().t()"),
        (narrow, "xent.linear_cross_entropy(x, w, y).backward()"),
        *((heads, head.format(more)) for more in ("", ", head_weight=(1.0, 0.5, 0.3, 0.1)", ", reduction='none'")),
    ]
    alone, both, library, of_chunk, *of_heads = peaks(*calls)
    assert alone <= 0.3 * size
    assert size <= both <= 1.3 * size
    assert of_chunk <= 1.5 * size / 2 + library - 64 * 32000 * 2
    # Four separate calls would hold four gradients of 62.5 MiB. The logits, their gradient and buffers have the rest.
    assert max(of_heads) <= (62.5 + 64 + 8) * MIB
