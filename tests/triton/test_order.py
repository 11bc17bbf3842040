"""Rows that are computed come first, with their facts: in one launch what PyTorch's sort and indexing give."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from tests.targets import Target
from xent.backends.torch import steps as plain
from xent.backends.torch.facts import Facts
from xent.backends.torch.options import Options, pack_numbers
from xent.backends.triton import order
from xent.backends.triton.facts import gather_facts
from xent.core.spec import LossSpec


def facts_of(target: Target, rows: int, idle: str, stats: tuple[str, ...]) -> Facts:
    """Return the facts of random rows; `idle` says which have no target. Every fifth has no weight."""
    torch.manual_seed(0)
    classes, weights = torch.randint(37, (rows,)), torch.rand(rows)
    classes[{"none": torch.zeros(rows) == 1, "some": torch.rand(rows) < 0.4, "all": torch.ones(rows) == 1}[idle]] = -100
    weights[3::5] = 0
    numbers = pack_numbers(LossSpec("mean"), None)
    given = (classes.to(target.device), None, weights.to(target.device), None, numbers)
    return gather_facts(Options(*given, -100, False, False, "mean", list(stats), "triton"), 37, torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 1024, 1025, 8193])
@pytest.mark.parametrize("idle", ["none", "some", "all"])
@pytest.mark.parametrize("stats", [(), ("lse",)], ids=str)
def test_order_number_and_facts(target: Target, rows: int, idle: str, stats: tuple[str, ...]) -> None:
    check(facts_of(target, rows, idle, stats))


def test_more_blocks_than_programs(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_PROGRAMS", 2)
    check(facts_of(target, 5000, "some", ()))


def check(facts: Facts) -> None:
    (places, number, found), (right_places, right_number, right) = (
        sort(facts) for sort in (order.computed_first, plain.computed_first)
    )
    assert torch.equal(places, right_places)
    assert int(number) == int(right_number) == int((~facts.idle).sum())
    for field in fields(Facts):
        one, other = getattr(found, field.name), getattr(right, field.name)
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), field.name
        elif other is not None:
            assert one == other, field.name
