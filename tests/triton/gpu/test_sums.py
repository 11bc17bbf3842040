"""The sum kernel: what it adds is the product, whole and to every element once."""

import pytest
import torch
from torch import Tensor

import xent
from xent.backends.triton import sums
from xent.backends.triton.hopper import hopper_multiprocessors
from xent.backends.triton.sums import add_product

SHAPES = [  # rows, vocabulary, width: whole tiles, ragged ones, fewer tiles than programs, fewer rows than slots have
    (512, 16_384, 1024),
    (1664, 12_808, 2304),
    (200, 1000, 72),
    (130, 40_008, 264),
    (128, 128, 256),
]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernel serve products of few rows too, which take less time here."""
    monkeypatch.setattr(sums, "_FEWEST_ROWS", 1)


def draw(rows: int, vocabulary: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    kinds = {"device": "cuda", "dtype": torch.bfloat16}
    return (
        30 * torch.randn(vocabulary, width, **kinds),
        torch.randn(rows, vocabulary, **kinds),
        torch.randn(rows, width, **kinds),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_rounding_of_the_exact_sum(shape: tuple[int, int, int]) -> None:
    total, left, right = draw(*shape)
    exact = total.double() + left.double().t() @ right.double()
    if not add_product(total, left.t(), right):
        assert not hopper_multiprocessors(0, sums.RELEASES)
        return
    # Float32 terms may tip a value that lies halfway between two.
    assert ((total.double() - exact).abs() <= 2.0**-8 * 1.01 * exact.abs() + 1e-3).all()


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_same_bits_each_time(shape: tuple[int, int, int]) -> None:
    total, left, right = draw(*shape)
    found = []
    for _ in range(5):
        found.append(total.clone())
        if not add_product(found[-1], left.t(), right):
            assert not hopper_multiprocessors(0, sums.RELEASES)
            return
    assert all(torch.equal(one, found[0]) for one in found)
    assert not torch.equal(found[0], total)


def test_memory_around_the_sum_is_left_alone() -> None:
    memory = torch.full((1002, 88), 7.0, device="cuda", dtype=torch.bfloat16)
    left = torch.randn(300, 1000, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(300, 72, device="cuda", dtype=torch.bfloat16)
    if not add_product(memory[1:1001, 8:80], left.t(), right):
        assert not hopper_multiprocessors(0, sums.RELEASES)
        return
    memory[1:1001, 8:80] = 7.0
    assert (memory == 7).all()


def test_nan_stays_in_its_row_and_column() -> None:
    total, left, right = draw(512, 1000, 512)
    left[3, 700] = torch.nan
    right[4, 300] = torch.inf
    if not add_product(total, left.t(), right):
        assert not hopper_multiprocessors(0, sums.RELEASES)
        return
    odd = ~total.isfinite()
    assert odd[700].all()
    assert odd[:, 300].all()
    odd[700], odd[:, 300] = False, False
    assert not odd.any()


def test_chunks_are_added_up_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks add to every class, so that errors would show."""
    torch.manual_seed(0)
    hidden = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(1024, 512, device="cuda") / 512**0.5).bfloat16().requires_grad_()
    target = torch.randint(1024, (2048,), device="cuda")
    wide = weight.detach().float().requires_grad_()
    logits = hidden.float() @ wide.t()
    (exact,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, target), wide)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a library added")

    if hopper_multiprocessors(0, sums.RELEASES):
        monkeypatch.setattr(torch, "addmm", refuse)
    loss = xent.linear_cross_entropy(hidden, weight, target, workspace=512 * 1024 * 2, backend="triton")
    (found,) = torch.autograd.grad(loss, weight)
    assert (found.float() - exact).norm() <= 5e-3 * exact.norm()
