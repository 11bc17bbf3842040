"""A quantized classifier gives the results of the same classifier in full, and is never dequantized as a whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import xent
from tests.targets import Target
from tests.torch.peak import peaks
from xent.backends.torch import products
from xent.integrations.torch import classifier

ROWS, WIDTH, V = 12, 16, 70


class Head:
    """An int8 classifier that records which ranges of its rows are read."""

    def __init__(self, device: Any, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.packed = torch.randint(-127, 128, (V, WIDTH), generator=generator, dtype=torch.int8).to(device)
        self.dense = (self.packed.to(dtype) / 256).requires_grad_(False)
        self.ranges: list[tuple[int, int]] = []
        self.weight = xent.QuantizedRows(self.packed, (V, WIDTH), self.rows)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return rows of the dense classifier."""
        self.ranges.append((start, stop))
        return self.packed[start:stop].to(dtype) / 256


def inputs(device: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states and a bias that require gradients, and targets."""
    generator = torch.Generator().manual_seed(1)
    hidden, bias = torch.randn(2, 6, WIDTH, generator=generator), torch.randn(V, generator=generator)
    target = torch.randint(V, (2, 6), generator=generator).to(device)
    target[0, 1] = -100
    return hidden.to(device, dtype).requires_grad_(), bias.to(device, dtype).requires_grad_(), target


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantize few classes at a time."""
    monkeypatch.setattr(products, "_PIECE_BYTES", 32 * WIDTH * 4)


USES: dict[str, Any] = {
    "mean": lambda *args, **bias: xent.linear_cross_entropy(*args, **bias, shift=1, softcap=5.0),
    "none": lambda *args, **bias: xent.linear_cross_entropy(*args, **bias, reduction="none").square(),
    "chunks": lambda *args, **bias: xent.linear_cross_entropy(*args, **bias, workspace=4 * V * 4),
    "log_probs": lambda *args, **bias: sum(xent.linear_log_probs(*args, **bias, entropy=True, temperature=0.7)),
    "probabilities": lambda hidden, weight, target, **bias: xent.linear_cross_entropy(
        hidden, weight, torch.full((*target.shape, V), 1 / V, device=target.device), **bias
    ),
    "student": lambda hidden, weight, target, **bias: xent.linear_divergence(
        hidden, weight, torch.linspace(-1, 1, V, device=target.device).expand(*target.shape, V), **bias
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use", USES)
def test_equals_the_dense_classifier(use: str, dtype: torch.dtype, target: Target) -> None:
    head, (hidden, bias, classes) = Head(target.device, dtype), inputs(target.device, dtype)
    results = []
    for weight in (head.weight, head.dense):
        loss = USES[use](hidden, weight, classes, linear_bias=bias, backend=target.name)
        results.append((loss.float(), *torch.autograd.grad(loss.sum(), (hidden, bias))))
    exact = dtype == torch.float32
    torch.testing.assert_close(*results, rtol=1e-5 if exact else 2e-2, atol=1e-5 if exact else 5e-2)
    assert max(stop - start for start, stop in head.ranges) <= (32 if exact else 64) < V
    assert {stop for _, stop in head.ranges} >= {V}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_gradients(dtype: torch.dtype, target: Target) -> None:
    """A dense classifier is read in tiles of classes, or in registers; a quantized one is not."""
    head, (hidden, bias, classes) = Head(target.device, dtype), inputs(target.device, dtype)
    with torch.no_grad():
        for use in ("mean", "log_probs"):
            ours, theirs = (
                USES[use](hidden, weight, classes, linear_bias=bias, backend=target.name, workspace=120)
                for weight in (head.weight, head.dense)
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    assert max(stop - start for start, stop in head.ranges) < V


def test_under_autocast(target: Target) -> None:
    head, (hidden, bias, classes) = Head(target.device, torch.float32), inputs(target.device, torch.float32)
    with torch.autocast(torch.device(target.device).type, torch.bfloat16):
        ours, theirs = (
            xent.linear_cross_entropy(hidden, weight, classes, linear_bias=bias, backend=target.name)
            for weight in (head.weight, head.dense)
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    assert hidden.dtype == torch.float32


def test_teacher(target: Target) -> None:
    head, (hidden, bias, _) = Head(target.device, torch.float32), inputs(target.device, torch.float32)
    student = torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(2)).to(target.device).requires_grad_()
    results = []
    for weight in (head.weight, head.dense):
        teacher = xent.LinearTeacher(hidden.detach().flip(0), weight, bias.detach(), softcap=4.0)
        loss = xent.linear_divergence(hidden, student, teacher, beta=0.5, backend=target.name)
        results.append((loss, *torch.autograd.grad(loss, (hidden, student))))
    torch.testing.assert_close(*results)


def test_refusals() -> None:
    head, (hidden, _, classes) = Head("cpu", torch.float32), inputs("cpu", torch.float32)
    trained = xent.QuantizedRows(head.dense.clone().requires_grad_(), (V, WIDTH), head.rows)
    with pytest.raises(ValueError, match="linear_weight requires a gradient, which a quantized classifier"):
        xent.linear_cross_entropy(hidden, trained, classes)
    with pytest.raises(ValueError, match=r"teacher\.weight requires a gradient, which a quantized"):
        xent.linear_divergence(hidden, head.dense, xent.LinearTeacher(hidden.detach(), trained))
    with pytest.raises(ValueError, match=r"linear_weight must have shape \(V, D\) with D = 16"):
        xent.linear_cross_entropy(hidden, xent.QuantizedRows(head.packed, (V, 8), head.rows), classes)
    with pytest.raises(ValueError, match="classifier whose rows can be selected, got a QuantizedRows"):
        xent.linear_divergence(
            hidden, head.dense, xent.Subset(xent.LinearTeacher(hidden.detach(), head.weight), torch.arange(V))
        )
    with pytest.raises(NotImplementedError, match=r"a QuantizedRows does not go through torch\.compile"):
        torch.func.grad(lambda each: xent.linear_cross_entropy(each, head.weight, classes))(hidden.detach())


def test_vocabulary_in_shards_is_refused(tmp_path: Path) -> None:
    head, (hidden, _, classes) = Head("cpu", torch.float32), inputs("cpu", torch.float32)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="vocab_parallel must be None for a QuantizedRows"):
            xent.linear_cross_entropy(hidden, head.weight, classes, vocab_parallel=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_a_linear_layer_is_returned_as_it_is() -> None:
    layer = torch.nn.Linear(WIDTH, V)
    assert classifier(layer) == (layer.weight, layer.bias)


def test_memory() -> None:
    """A float32 copy of the classifier would take 128 MiB."""
    setup = (
        "packed = torch.ones(2**15, 2**10, dtype=torch.int8)\n"
        "weight = xent.QuantizedRows(packed, (2**15, 2**10), lambda a, b, dtype: packed[a:b].to(dtype) / 128)\n"
        "hidden = torch.randn(8, 2**10, requires_grad=True); target = torch.arange(8)"
    )
    (peak,) = peaks((setup, "xent.linear_cross_entropy(hidden, weight, target).backward()"))
    assert peak < 110 * 2**20
