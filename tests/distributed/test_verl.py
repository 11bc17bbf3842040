"""verl's function with a tensor-parallel group has the results of one process, and their gradients.

The gradients of the hidden states add up over ranks, which verl leaves to Megatron.
"""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pool, device, group
from xent.integrations.verl import linear_cross_entropy

CLASSES, RANKS = 12, 2


def run(reduction: str) -> None:
    """Compare this rank's shard of the classifier with the whole classifier."""
    rank = dist.get_rank()
    if rank >= RANKS:
        return
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=generator).to(device()).requires_grad_()
    weight = torch.randn(CLASSES, 8, generator=generator).to(device()).requires_grad_()
    labels = torch.randint(CLASSES, (2, 5), generator=generator).to(device())
    expected = linear_cross_entropy(hidden, weight, labels, 0.7, reduction)
    upstream = [torch.rand(each.shape, generator=generator).to(device()) for each in expected]
    of_hidden, of_weight = torch.autograd.grad(expected, (hidden, weight), upstream)
    mine = slice(rank * CLASSES // RANKS, (rank + 1) * CLASSES // RANKS)
    shard = weight.detach()[mine].clone().requires_grad_()
    results = linear_cross_entropy(hidden, shard, labels, 0.7, reduction, group(RANKS))
    torch.testing.assert_close(results, expected)
    gradients = torch.autograd.grad(results, (hidden, shard), upstream)
    torch.testing.assert_close(gradients, (of_hidden / RANKS, of_weight[mine]))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_classes_in_shards(reduction: str, pool: Pool) -> None:
    pool.run(run, reduction)
