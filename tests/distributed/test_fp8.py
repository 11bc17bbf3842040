"""Products in 8 bits with a vocabulary in shards: the loss of one process, the same bits on all ranks.

Each rank makes the likeliest of its own classes exact. So results are compared closely without any, and as far as 8
bits differ from 16 with them.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

import xent
from tests.distributed.pool import PROCESSES, Pool, device, group
from tests.distributed.test_dtensors import flat, put, whole
from xent.backends.torch import fp8_source

CLASSES, WIDTH, ROWS = 41, 24, 12
CUTS = (slice(0, 17), slice(17, 17), slice(17, 40), slice(40, 41))
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {"bias": True},
    "sum": {"reduction": "sum", "z_loss": 0.1, "label_smoothing": 0.1, "softcap": 5.0, "workspace": 4 * 48 * 5},
    "none": {"reduction": "none", "stats": ("lse", "entropy"), "workspace": 4 * 48 * 5},
    "probabilities": {"probabilities": True},
}

pytestmark = pytest.mark.skipif(PROCESSES < 4, reason="there are four shards")


def call(options: dict[str, Any], cut: slice, **more: Any) -> tuple[Tensor, ...]:
    """Return the loss and its gradients for some rows of the classifier."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(CLASSES, WIDTH, generator=generator) / 4
    bias, target = torch.randn(CLASSES, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)
    target[1] = -100
    options = dict(options)
    leaves = [hidden, weight[cut], bias[cut]] if options.pop("bias", False) else [hidden, weight[cut]]
    leaves = [leaf.to(device()).bfloat16().requires_grad_() for leaf in leaves]
    if options.pop("probabilities", False):
        target = torch.randn(ROWS, CLASSES, generator=generator).softmax(-1)[:, cut]
    named = dict(zip(("input", "linear_weight", "linear_bias"), leaves, strict=False))
    backend = "auto" if device().type == "cuda" else "torch"
    made = xent.linear_cross_entropy(
        **named, target=target.to(device()), precision="fp8", backend=backend, **options, **more
    )
    loss: Tensor = made[0] if isinstance(made, tuple) else made
    return loss.detach(), *torch.autograd.grad(
        (loss * torch.arange(1.0, 1 + loss.numel(), device=device())).sum(), leaves
    )


def compare(name: str, likeliest: int) -> Tensor:
    """Compare a call in four processes with one on the whole vocabulary. Return the loss."""
    options, cut = OPTIONS[name], CUTS[dist.get_rank()]
    with patch.object(fp8_source, "_LIKELIEST", likeliest):
        loss, *gradients = call(options, cut, vocab_parallel=xent.VocabParallel(group(4), cut.start, CLASSES))
        expected, *others = call(options, slice(None))
    tolerance = 3e-2 if likeliest else 1e-5
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for place, (own, other) in enumerate(zip(gradients, others, strict=True)):
        right = (other if place == 0 else other[cut]).float()
        error = (own.float() - right).norm()
        assert error <= 0.1 * right.norm(), (place, error, right.norm())
    return loss.cpu()


@patch.object(fp8_source, "_LIKELIEST", 0)
def of_dtensors() -> None:
    """Compare DTensors, which need no `vocab_parallel`, with one process."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(device()).bfloat16()
    weight = torch.randn(CLASSES, WIDTH, generator=generator).to(device()).bfloat16()
    target = torch.arange(ROWS, device=device())
    leaf = put(weight, flat(), Shard(0))
    named = {"precision": "fp8", "backend": "auto" if device().type == "cuda" else "torch"}
    loss = xent.linear_cross_entropy(hidden, leaf, target, **named)
    loss.backward()
    plain = weight.clone().requires_grad_()
    expected = xent.linear_cross_entropy(hidden, plain, target, **named)
    expected.backward()
    torch.testing.assert_close(whole(loss), expected, rtol=1e-5, atol=1e-5)
    own, right = whole(leaf.grad).float(), plain.grad.float()  # type: ignore[union-attr]
    assert (own - right).norm() <= 0.03 * right.norm()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("likeliest", [0, 4])
def test_shards(pool: Pool, name: str, likeliest: int) -> None:
    losses = pool.run(compare, name, likeliest)
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_dtensors(pool: Pool) -> None:
    pool.run(of_dtensors)
