"""Which sums the sum kernel adds to, asked of tensors that are not there, and what becomes of the others."""

from typing import Any

import pytest
import torch

from tests.triton.test_product_rule import Factor
from xent.backends.torch.product_sum import ProductSum
from xent.backends.triton import sums


@pytest.fixture(autouse=True)
def chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have 132 multiprocessors."""
    monkeypatch.setattr(sums, "hopper_multiprocessors", lambda *_: 132)


def asked(total: Any = None, left: Any = None, right: Any = None) -> bool:
    return sums._serves(total or Factor(1000, 64), left or Factor(2048, 1000), right or Factor(2048, 64))


def test_kinds() -> None:
    assert asked()
    for kind in (torch.float16, torch.float32):
        assert not asked(Factor(1000, 64, dtype=kind), Factor(2048, 1000, dtype=kind), Factor(2048, 64, dtype=kind))
    assert not asked(total=Factor(1000, 64, dtype=torch.float32))
    assert not asked(total=Factor(1000, 64, kind="cpu"))


def test_sizes() -> None:
    assert not asked(left=Factor(1535, 1000), right=Factor(1535, 64))
    assert not asked(left=Factor(2048, 1001), total=Factor(1001, 64))
    assert not asked(right=Factor(2048, 60), total=Factor(1000, 60))
    assert asked(total=Factor(1000, 64, (72, 1)))
    assert not asked(left=Factor(2048, 1000, address=4098))


@pytest.mark.parametrize("serves", [True, False])
def test_pytorch_adds_what_is_not_served(serves: bool) -> None:
    """And nothing twice."""
    asked_for = []

    def add(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
        asked_for.append(len(right))
        if serves:
            total += left @ right
        return serves

    torch.manual_seed(0)
    left, right = torch.randn(3, 5, 7), torch.randn(3, 7, 4)
    total = ProductSum(torch.Size((5, 4)), torch.float32, torch.float32, torch.device("cpu"), 3, add)
    for index in range(3):
        total.add(left[index], right[index], index == 2)
    torch.testing.assert_close(total.result(), (left @ right).sum(0))
    assert asked_for == [7, 7]
