"""Several heads under torch.compile, torch.func and autocast, and their memory."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import xent
from tests.targets import Target
from tests.torch.peak import peak

MIB = 2**20
SHIFT = (1, 2, 9)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def drawn(target: Target, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(3, batch, 5, 8, device=target.device), torch.randn(11, 8, device=target.device)
    return x.requires_grad_(), w.requires_grad_(), torch.randint(11, (batch, 5), device=target.device)


def test_compiles_whole_and_recompiles_for_weights_and_for_sizes_once_at_most(target: Target) -> None:
    def loss(x: Tensor, w: Tensor, y: Tensor, head_weight: tuple[float, ...]) -> Tensor:
        return xent.linear_cross_entropy(x, w, y, shift=SHIFT, head_weight=head_weight, backend=target.name)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for batch in (2, 3, 4):
        x, w, y = drawn(target, batch)
        for weights in ((1.0, 0.5, 0.25), (1.0, 0.4, 0.2), (1.0, 0.3, 0.1)):
            found, expected = compiled(x, w, y, weights), loss(x, w, y, weights)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(*(torch.autograd.grad(made, (x, w)) for made in (found, expected)))
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("probabilities", [False, True])
def test_statistics_of_rows_have_gradients_in_a_compiled_graph_too(target: Target, probabilities: bool) -> None:
    x, w, y = drawn(target)
    given = torch.softmax(torch.randn(2, 5, 11, device=target.device), -1) if probabilities else y
    names = ("lse", "accuracy", "count")

    def loss(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        rows, stats = xent.linear_cross_entropy(
            x, w, given, shift=SHIFT, reduction="none", stats=names, backend=target.name
        )
        return rows, stats.accuracy, stats.count

    torch.testing.assert_close(loss(x, w), torch.compile(loss, fullgraph=True, backend="aot_eager")(x, w))


def test_second_backward_and_transforms_give_the_same_gradients(target: Target) -> None:
    x, w, y = drawn(target)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return xent.linear_cross_entropy(x, w, y, shift=SHIFT, backend=target.name)

    value = loss(x, w)
    first = torch.autograd.grad(value, (x, w), retain_graph=True)
    for again in (torch.autograd.grad(value, (x, w)), torch.func.grad(loss, argnums=(0, 1))(x.detach(), w.detach())):
        torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_autocast(target: Target) -> None:
    x, w, y = drawn(target)
    with torch.autocast(target.device, dtype=torch.bfloat16):
        found = xent.linear_cross_entropy(x, w, y, shift=SHIFT, backend=target.name)
        parts = [
            xent.linear_cross_entropy(x[head], w, y, shift=shift, backend=target.name)
            for head, shift in enumerate(SHIFT)
        ]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.stack(parts).sum())


@pytest.mark.parametrize("name", ["sample_weight", "normalizer"])
def test_arguments_without_gradient_must_not_require_one(target: Target, name: str) -> None:
    x, w, y = drawn(target)
    given = torch.ones((2, 5) if name == "sample_weight" else (), device=target.device, requires_grad=True)
    with pytest.raises(ValueError, match=f"{name} requires a gradient, which xent does not compute"):
        xent.linear_cross_entropy(x, w, y, shift=SHIFT, backend=target.name, **{name: given})
    with pytest.raises(NotImplementedError, match="target is batched by torch"):
        torch.vmap(lambda y: xent.linear_cross_entropy(x, w, y, shift=SHIFT))(torch.stack([y, y]))


@pytest.mark.parametrize("options", ["", ", head_weight=(1.0, 0.5, 0.3, 0.1)", ", reduction='none'"])
def test_four_heads_hold_one_gradient_of_the_classifier(options: str) -> None:
    """Four separate calls would hold four gradients of 62.5 MiB."""
    setup = """
x, w = torch.randn(4, 64, 512).requires_grad_(), torch.randn(32000, 512).requires_grad_()
y = torch.randint(32000, (64,))
"""
    call = f"xent.linear_cross_entropy(x, w, y, shift=(1, 2, 3, 4){options}).sum().backward()"
    assert peak(setup, call) <= 130 * MIB
