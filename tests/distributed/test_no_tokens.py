"""Calls without tokens, where every rank still has to take part in each collective."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import xent
from tests.distributed.pool import Pool, device, group


def empty(reduction: str, sequence_parallel: bool, rows: tuple[int, ...]) -> Any:
    """Return the loss and the shapes of the gradients of this rank."""
    if dist.get_rank() > 1:
        return None
    hidden = torch.zeros(*rows, 4, device=device())
    if sequence_parallel:
        hidden = hidden.tensor_split([-(-rows[-1] // 2)], -2)[dist.get_rank()]
    hidden.requires_grad_()
    weight = torch.ones(3, 4, device=device(), requires_grad=True)
    target = torch.zeros(rows, dtype=torch.int64, device=device())
    shards = xent.VocabParallel(group(2), sequence_parallel=sequence_parallel)
    loss = xent.linear_cross_entropy(hidden, weight, target, reduction=reduction, vocab_parallel=shards)
    grads = torch.autograd.grad(loss.sum(), (hidden, weight))
    assert grads[0].shape == hidden.shape
    return float(loss.sum()), [bool(grad.any()) for grad in grads]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("rows", [(0,), (2, 0), (0, 3)])
def test_no_tokens(pool: Pool, reduction: str, sequence_parallel: bool, rows: tuple[int, ...]) -> None:
    assert pool.run(empty, reduction, sequence_parallel, rows)[:2] == [(0.0, [False, False])] * 2
