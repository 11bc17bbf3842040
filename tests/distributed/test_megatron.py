"""The replacements of Megatron's functions compute Megatron's documented formulas."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.pool import Pool, device, group
from xent.integrations.megatron import fused_vocab_parallel_cross_entropy, vocab_parallel_cross_entropy

CLASSES = 12


def expected_loss(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Return (1 - a) (-log p_y) plus a / (V - 1) times -log p of the other classes, for logits (T, B, V)."""
    shares = torch.full_like(logits, smoothing / (CLASSES - 1)).scatter(-1, target[..., None], 1 - smoothing)
    return -(shares * logits.log_softmax(-1)).sum(-1)


def run(dtype: torch.dtype, smoothing: float, fused: bool, patched: bool) -> None:
    """Compare loss and gradient of this rank's shard."""
    rank, ranks = dist.get_rank(), 2
    if rank >= ranks:
        return
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, CLASSES, generator=generator).to(device(), dtype)
    target = torch.randint(CLASSES, (5, 3), generator=generator).to(device())
    upstream = torch.rand(5, 3, generator=generator).to(device())
    wide = logits.clone().float().requires_grad_()
    wanted = expected_loss(wide, target, smoothing)
    (wanted * upstream).sum().backward()
    mine = slice(rank * CLASSES // ranks, (rank + 1) * CLASSES // ranks)
    shard = logits[..., mine].clone().requires_grad_()
    target[0, 0], target[1, 1] = -1, CLASSES  # a loss mask excludes these
    with pytest.MonkeyPatch.context() as patch:
        if patched:
            state: Any = ModuleType("megatron.core.parallel_state")
            state.get_tensor_model_parallel_group = lambda: group(ranks)
            patch.setitem(sys.modules, "megatron.core.parallel_state", state)
        if fused:
            loss = fused_vocab_parallel_cross_entropy(shard, target, group(ranks))
        else:
            loss = vocab_parallel_cross_entropy(shard, target, smoothing, None if patched else group(ranks))
    assert loss.dtype == torch.float32
    (loss * upstream).sum().backward()
    outside = torch.zeros_like(target, dtype=torch.bool)
    outside[0, 0] = outside[1, 1] = True
    torch.testing.assert_close(loss, wanted.detach().masked_fill(outside, 0))
    assert shard.grad is not None
    assert wide.grad is not None
    assert shard.grad.dtype == dtype
    expected = wide.grad[..., mine].masked_fill(outside[..., None], 0).to(dtype)
    torch.testing.assert_close(shard.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("smoothing", "fused", "patched"),
    [(0.0, False, False), (0.0, True, False), (0.1, False, False), (0.3, False, True)],
)
def test_loss_and_gradient(pool: Pool, dtype: torch.dtype, smoothing: float, fused: bool, patched: bool) -> None:
    pool.run(run, dtype, smoothing, fused, patched)


def refusals() -> None:
    """Expect errors for arguments that Megatron does not accept."""
    if dist.get_rank() > 1:
        return
    logits, target = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 0.75\] for 4 classes, got 0.8"):
        vocab_parallel_cross_entropy(logits, target, 0.8, group(2))
    with pytest.raises(ValueError, match=r"tp_group must be a process group: megatron.core is not imported"):
        vocab_parallel_cross_entropy(logits, target)


def test_refusals(pool: Pool) -> None:
    pool.run(refusals)


def small_targets(dtype: torch.dtype) -> None:
    """Targets of a dtype that has no -100: those outside of the classes, 200 on both ranks, have loss 0."""
    rank, ranks = dist.get_rank(), 2
    if rank >= ranks:
        return
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).to(device())
    target = torch.tensor([7, 250, 120], dtype=dtype, device=device())
    loss = fused_vocab_parallel_cross_entropy(logits[:, rank * 100 : (rank + 1) * 100], target, group(ranks))
    wanted = -logits.log_softmax(-1)[[0, 2], [7, 120]]
    torch.testing.assert_close(loss, torch.stack([wanted[0], torch.zeros_like(wanted[0]), wanted[1]]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_targets_of_any_integer_dtype(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(small_targets, dtype)
