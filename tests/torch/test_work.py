"""Work and memory in PyTorch: results that are not needed are not computed, and unneeded memory is not kept."""

from typing import Any

import pytest
import torch

import xent
from tests.torch.peak import peak
from tests.torch.products import flops_of

N, D, V = 64, 16, 40
PRODUCT = 2 * N * D * V


def flops(
    needs: tuple[bool, bool, bool], reduction: str = "mean", ignored: float = 0.0, stats: tuple[str, ...] = ()
) -> int:
    """Count the multiplications and additions of matrix products, forward and backward."""
    torch.manual_seed(0)
    target = torch.randint(V, (N,))
    target[: int(ignored * N)] = -100
    leaves = [torch.randn(size) for size in ((N, D), (V, D), (V,))]
    options: dict[str, Any] = {"reduction": reduction, "stats": stats, "workspace": V * 4 * 10, "backend": "torch"}

    def call() -> None:
        given = [leaf.requires_grad_(need) for leaf, need in zip(leaves, needs, strict=True)]
        made = xent.linear_cross_entropy(*given[:2], target, linear_bias=given[2], **options)
        loss = made[0] if stats else made
        if any(needs):
            loss.backward(torch.ones_like(loss))
        assert [leaf.grad is not None for leaf in given] == list(needs)

    return flops_of(call)


@pytest.mark.parametrize(
    ("needs", "products"),
    [
        ((True, True, True), 3),
        ((True, True, False), 3),
        ((True, False, False), 2),
        ((False, True, False), 2),
        ((False, False, True), 1),
        ((False, False, False), 1),
    ],
)
def test_number_of_matrix_products(needs: tuple[bool, bool, bool], products: int) -> None:
    assert flops(needs) == products * PRODUCT
    assert flops(needs, reduction="none") == (products + any(needs)) * PRODUCT


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_rows_are_not_multiplied(reduction: str) -> None:
    some, every = (flops((True, True, True), reduction, ignored) for ignored in (0.75, 0.0))
    assert some == every // 4
    assert flops((True, True, True), reduction, ignored=1.0) == 0
    assert flops((True, True, True), reduction, ignored=0.75, stats=("lse", "predictions")) == every // 4


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "frozen"])
def test_no_gradient_without_grad_mode(reduction: str, how: str) -> None:
    """One product makes the logits; no memory of a gradient's size is taken, see also below."""
    x, w, y = torch.randn(N, D), torch.randn(V, D), torch.randint(V, (N,))
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "frozen": torch.enable_grad}
    leaves = [leaf.requires_grad_(how != "frozen") for leaf in (x, w)]
    with modes[how]():
        made: list[torch.Tensor] = []
        used = flops_of(lambda: made.append(xent.linear_cross_entropy(*leaves, y, reduction=reduction)))
    assert used == PRODUCT
    assert not made[0].requires_grad
    assert bool(made[0].isfinite().all())


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
