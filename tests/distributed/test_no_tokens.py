"""Calls without tokens, where every rank still has to take part in each collective."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import xent
from tests.distributed.pool import Pool, device, group


def empty(reduction: str, sequence_parallel: bool, leading: tuple[int, ...]) -> Any:
    """Return the loss and the shapes of the gradients of this rank."""
    if dist.get_rank() > 1:
        return None
    hidden = torch.zeros(*leading, 0, 4, device=device(), requires_grad=True)
    weight = torch.ones(3, 4, device=device(), requires_grad=True)
    target = torch.zeros(*leading, 0, dtype=torch.int64, device=device())
    shards = xent.VocabParallel(group(2), sequence_parallel=sequence_parallel)
    loss = xent.linear_cross_entropy(hidden, weight, target, reduction=reduction, vocab_parallel=shards)
    grads = torch.autograd.grad(loss.sum(), (hidden, weight))
    return float(loss.sum()), [tuple(grad.shape) for grad in grads], [bool(grad.any()) for grad in grads]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("leading", [(), (2,)])
def test_no_tokens(pool: Pool, reduction: str, sequence_parallel: bool, leading: tuple[int, ...]) -> None:
    found = pool.run(empty, reduction, sequence_parallel, leading)[:2]
    assert found == [(0.0, [(*leading, 0, 4), (3, 4)], [False, False])] * 2
