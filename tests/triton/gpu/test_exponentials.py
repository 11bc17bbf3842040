"""The exponentials kernel: what it writes and adds up, and the gradients that come of it, without any logits."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.triton import test_exponentials as stand_in
from tests.triton.gpu.test_work import MIB, peak
from tests.triton.test_exponentials import make_tiles
from xent.backends.torch.linear import Linear
from xent.backends.triton import exponentials
from xent.backends.triton.hopper import hopper_multiprocessors
from xent.core.spec import LossSpec

SERVED = torch.cuda.is_available() and hopper_multiprocessors(0, exponentials.RELEASES) > 0
OPTIONS: list[dict[str, float]] = [{}, {"softcap": 20.0}, {"z_loss": 1e-3, "logit_scale": 0.7}]


@pytest.fixture(autouse=True)
def no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to make logits, where the kernel runs."""

    def refuse(*_: object) -> None:
        raise AssertionError("logits were stored")

    if SERVED:
        monkeypatch.setattr(Linear, "write_logits", refuse)


def draw(rows: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device="cuda").bfloat16()
    weight = (3 * torch.randn(vocabulary, width, device="cuda") / width**0.5).bfloat16()
    return hidden, weight, torch.randint(vocabulary, (rows,), device="cuda")


def gradients(loss: Any, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and both gradients, of a loss of hidden states and classifier."""
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    found = loss(*leaves)
    return found.detach(), *torch.autograd.grad(found, leaves, torch.full_like(found, 0.5))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 72, 256), (128, 64, 512), (2500, 128, 1031), (300, 200, 40_009), (129, 4096, 520)], ids=str
)
def test_kernel(shape: tuple[int, int, int], options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each exponential to one rounding, those of a piece of the classes, and nothing around them."""
    if not SERVED:
        return
    monkeypatch.setattr(stand_in, "TILE", exponentials.CLASSES)
    hidden, weight, target = draw(*shape)
    rows, first = len(hidden), 8
    pitch = -(-(len(weight) - first) // 8) * 8 + 16
    found, right = torch.full((2, rows, pitch), 7.0, device="cuda", dtype=torch.bfloat16)
    dead = torch.arange(rows, device="cuda") % 5 == 4
    facts = SimpleNamespace(target=target, dead=dead, ignored=dead, spec=replace(LossSpec(), **options))
    reference = torch.randn(rows, device="cuda")
    sums = torch.full((2, 2, 400, rows), 5.0, device="cuda")
    inside = slice(8, 8 + len(weight) - first)
    for launch, out, into in ((exponentials._launch, found, sums[0]), (make_tiles, right, sums[1])):
        product = exponentials._Product(hidden, (first, weight[first:], out[:, inside]))
        launch(product, facts, reference, torch.ones((), dtype=torch.int32, device="cuda"), into, 1)
    kept = found.clone()
    found[:, 8 : pitch - 8] = 7.0  # up to a boundary of 16 bytes, the copy engine writes nothing less
    assert (found == 7).all()
    tiles = -(-(len(weight) - first) // 256)
    torch.testing.assert_close(sums[0, :, 1 : 1 + tiles], sums[1, :, 1 : 1 + tiles], rtol=1e-4, atol=1e-4)
    assert (sums[:, :, tiles + 1 :] == 5).all()
    torch.testing.assert_close(kept[:, inside].float(), right[:, inside].float(), rtol=2**-7, atol=1e-30)


def test_nothing_to_do() -> None:
    if not SERVED:
        return
    hidden, weight, target = draw(300, 64, 1000)
    out = torch.full((300, 1000), 7.0, device="cuda", dtype=torch.bfloat16)
    facts = SimpleNamespace(target=target, dead=target < 0, spec=LossSpec())
    sums = torch.zeros(2, 4, 300, device="cuda")
    todo = torch.zeros((), dtype=torch.int32, device="cuda")
    product = exponentials._Product(hidden, (0, weight, out))
    exponentials._launch(product, facts, torch.zeros(300, device="cuda"), todo, sums)
    assert (out == 7).all()
    assert (sums == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("vocabulary", [50_264, 50_257])
def test_gradients(vocabulary: int, options: dict[str, float], reduction: str) -> None:
    hidden, weight, target = draw(5000, 512, vocabulary)
    target[::7] = -100
    kinds: dict[str, Any] = {"reduction": reduction, **options}

    def ours(h: Tensor, w: Tensor) -> Tensor:
        return xent.linear_cross_entropy(h, w, target, backend="triton", **kinds)

    def exact(h: Tensor, w: Tensor) -> Tensor:
        return xent.cross_entropy(h.double() @ w.double().t(), target, backend="torch", **kinds)

    loss, *made = gradients(ours, hidden, weight)
    expected, *right = gradients(exact, hidden, weight)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-4 if SERVED else 5e-2)
    for found, wanted in zip(made, right, strict=True):
        assert (found.double() - wanted.double()).norm() <= (4e-3 if SERVED else 2e-2) * wanted.double().norm()


def test_errors_are_at_most_those_of_the_unfused_computation() -> None:
    """Where every class is somebody's target, and chunks add to all."""
    hidden, weight, target = draw(4096, 512, 4096)

    def ours(h: Tensor, w: Tensor) -> Tensor:
        return xent.linear_cross_entropy(h, w, target, workspace=512 * 4096 * 2, backend="triton")

    def unfused(h: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy((h @ w.t()).float(), target)

    def exact(h: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(h.double() @ w.double().t(), target)

    found, plain, right = (gradients(loss, hidden, weight)[1:] for loss in (ours, unfused, exact))
    for ours_, theirs, wanted in zip(found, plain, right, strict=True):
        error, yardstick = ((made.double() - wanted.double()).norm() for made in (ours_, theirs))
        assert error <= (1.02 if SERVED else 4) * yardstick


def test_terms_cancel_before_they_are_rounded() -> None:
    """Where a head knows how frequent its classes are, by a column that is the same in all hidden states."""
    torch.manual_seed(0)
    share = 1 / torch.arange(1, 4097, device="cuda")
    target = torch.multinomial(share, 8192, replacement=True)
    hidden, weight = torch.randn(8192, 256, device="cuda"), torch.randn(4096, 256, device="cuda") / 16
    hidden[:, 0], weight[:, 0] = 10, share.log() / 10
    hidden, weight = hidden.bfloat16(), weight.bfloat16()

    def error(loss: Any) -> float:
        leaf = weight.clone().requires_grad_()
        (made,) = torch.autograd.grad(loss(hidden, leaf), leaf)
        return float((made.double() - exact).norm())

    wide = weight.double().requires_grad_()
    (exact,) = torch.autograd.grad(torch.nn.functional.cross_entropy(hidden.double() @ wide.t(), target), wide)
    unfused = error(lambda h, w: torch.nn.functional.cross_entropy((h @ w.t()).float(), target))
    for rows in (2048, 8192):
        kinds = {"workspace": rows * 4096 * 2, "backend": "triton"}
        ours = error(lambda h, w, kinds=kinds: xent.linear_cross_entropy(h, w, target, **kinds))
        assert ours <= 1.3 * unfused


def test_what_classifier_rows_share_cancels_before_it_is_rounded() -> None:
    """In the gradient of hidden states that are orthogonal to it, so that no logit shows it."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(256, 256, device="cuda"), torch.randn(4096, 256, device="cuda") / 16
    target = torch.randint(4096, (256,), device="cuda")
    shared = torch.nn.functional.normalize(torch.randn(256, device="cuda"), dim=0)
    hidden = (hidden - (hidden @ shared)[:, None] * shared).bfloat16()
    weight = (weight + 8 * shared).bfloat16()

    def error(loss: Any) -> float:
        leaf = hidden.clone().requires_grad_()
        (made,) = torch.autograd.grad(loss(leaf, weight), leaf)
        return float((made.double() - exact).norm())

    wide = hidden.double().requires_grad_()
    (exact,) = torch.autograd.grad(torch.nn.functional.cross_entropy(wide @ weight.double().t(), target), wide)
    unfused = error(lambda h, w: torch.nn.functional.cross_entropy((h @ w.t()).float(), target))
    assert error(lambda h, w: xent.linear_cross_entropy(h, w, target, backend="triton")) <= 1.3 * unfused


def test_overflow_is_made_again() -> None:
    """In a CUDA graph too, and each time that it is replayed as its rows then are."""
    hidden, weight, target = draw(700, 256, 9000)
    far = hidden.clone()
    for row in (5, 400):
        other = weight[(target[row] + 1) % 9000].float()
        far[row] = (150 * other / other.square().sum()).bfloat16()
    held = hidden.clone()
    leaves = held.requires_grad_(), weight.clone().requires_grad_()

    def step() -> tuple[Tensor, ...]:
        loss = xent.linear_cross_entropy(*leaves, target, backend="triton")
        return loss, *torch.autograd.grad(loss, leaves)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for values in (hidden, far, hidden):
        with torch.no_grad():
            held.copy_(values)
        graph.replay()
        wide = values.double().requires_grad_(), weight.double().requires_grad_()
        loss = torch.nn.functional.cross_entropy(wide[0] @ wide[1].t(), target)
        torch.testing.assert_close(captured[0].double(), loss, rtol=1e-5 if SERVED else 2e-3, atol=0)
        for found, exact in zip(captured[1:], torch.autograd.grad(loss, wide), strict=True):
            assert (found.double() - exact).norm() <= (4e-3 if SERVED else 2e-2) * exact.norm()


def test_same_bits_each_time() -> None:
    hidden, weight, target = draw(1700, 512, 40_016)
    target[::3] = 7

    def ours(h: Tensor, w: Tensor) -> Tensor:
        return xent.linear_cross_entropy(h, w, target, workspace=600 * 40_016 * 2, backend="triton")

    first, *others = (gradients(ours, hidden, weight) for _ in range(4))
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


def test_memory() -> None:
    """A chunk and both gradients, and little else."""
    hidden, weight, target = draw(4096, 256, 64_000)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    chunk, gradient = 1024 * 64_000 * 2, (4096 + 64_000) * 256 * 2

    def step() -> None:
        torch.autograd.grad(xent.linear_cross_entropy(*leaves, target, workspace=chunk, backend="triton"), leaves)

    assert peak(step) <= chunk + gradient + (8 if SERVED else 24) * MIB
