"""Promises for all calls, tested with shards: repeatable results, no unneeded work, early errors."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import xent
from tests.distributed.pool import Pool, device, group

CLASSES, WIDTH = 10, 6


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states and targets, the same in all processes, and this rank's half of a classifier."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, WIDTH, generator=generator).to(device(), dtype).requires_grad_()
    target = torch.randint(CLASSES, (3, 5), generator=generator).to(device())
    whole = torch.randn(CLASSES, WIDTH, generator=generator)
    half = slice(CLASSES // 2 * dist.get_rank(), CLASSES // 2 * (dist.get_rank() + 1))
    return hidden, whole[half].to(device(), dtype).requires_grad_(), target


def in_pair(function: Any) -> Any:
    """Decorate a function to run in the first two processes only, without a cached layout."""
    if dist.get_rank() > 1:
        return None
    return function()


def _twice() -> None:
    for reduction in ("mean", "none"):
        seen = []
        for _ in range(2):
            hidden, weight, target = tensors(torch.bfloat16)
            loss = xent.linear_cross_entropy(hidden, weight, target, reduction=reduction, vocab_parallel=group(2))
            upstream = torch.linspace(0.5, 2, loss.numel(), device=device()).view(loss.shape)
            kept = torch.autograd.grad(loss, (hidden, weight), upstream, retain_graph=True)
            seen.append((loss.detach(), *kept, *torch.autograd.grad(loss, (hidden, weight), upstream)))
        assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
        assert torch.equal(seen[0][1], seen[0][3])
        assert torch.equal(seen[0][2], seen[0][4])


def _second_derivatives() -> None:
    for reduction in ("mean", "none"):
        hidden, weight, target = tensors()
        logits = hidden @ weight.t()
        for function, sources in ((xent.linear_cross_entropy, (hidden, weight)), (xent.cross_entropy, (logits,))):
            loss = function(*sources, target, reduction=reduction, vocab_parallel=group(2)).sum()
            (grad,) = torch.autograd.grad(loss, sources[0], create_graph=True)
            with pytest.raises(RuntimeError, match="xent computes no second derivatives"):
                grad.square().sum().backward()
            with pytest.raises(RuntimeError, match=r"a vocabulary in shards does not go through torch\.func"):
                torch.func.grad(partial(function, target=target, vocab_parallel=group(2)))(*sources)


def _entropy_changed_in_place() -> None:
    """Backward passes do not use the entropy that is returned."""
    hidden, weight, target = tensors()
    grads = []
    for factor in (1, 2):
        call = {"reduction": "none", "stats": ("entropy",), "vocab_parallel": group(2)}
        loss, stats = xent.cross_entropy(hidden @ weight.t(), target, **call)
        with torch.no_grad():
            stats.entropy.mul_(factor)
        grads.append(torch.autograd.grad(loss.sum(), hidden)[0])
    assert torch.equal(*grads)


def _under_no_grad() -> None:
    hidden, weight, target = tensors()
    expected = xent.linear_cross_entropy(hidden, weight, target, vocab_parallel=group(2))
    with torch.no_grad():
        found = xent.linear_cross_entropy(hidden, weight, target, vocab_parallel=group(2))
    assert found.grad_fn is None
    assert torch.equal(found, expected)


def _autocast() -> None:
    hidden, weight, target = tensors()
    with torch.autocast(device().type, torch.bfloat16):
        loss = xent.linear_cross_entropy(hidden, weight, target, vocab_parallel=group(2))
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    narrow = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    expected = xent.linear_cross_entropy(*narrow, target, vocab_parallel=group(2))
    assert torch.equal(loss, expected)


def _layouts() -> None:
    """Strides and the class axis change nothing."""
    hidden, weight, target = tensors()
    logits = (hidden @ weight.t()).detach()
    expected = xent.cross_entropy(logits.requires_grad_(), target, vocab_parallel=group(2))
    (wanted,) = torch.autograd.grad(expected, logits)
    moved = logits.detach().movedim(-1, 1).contiguous().requires_grad_()
    found = xent.cross_entropy(moved, target, axis=1, vocab_parallel=group(2))
    (made,) = torch.autograd.grad(found, moved)
    assert torch.equal(found, expected)
    assert torch.equal(made.movedim(1, -1), wanted)


def _meshes() -> None:
    """Accept a one-dimensional DeviceMesh as the group. Refuse one with more dimensions, and other objects."""
    hidden, weight, target = tensors()
    # of groups that exist: all four processes would have to make new ones
    mesh = DeviceMesh.from_group(group(2), device().type, mesh_dim_names=("tp",))
    expected = xent.linear_cross_entropy(hidden, weight, target, vocab_parallel=group(2))
    found = xent.linear_cross_entropy(hidden, weight, target, vocab_parallel=mesh)
    assert torch.equal(found, expected)
    with pytest.raises(TypeError, match=r"must be a torch.distributed process group, .*got str 'tp'"):
        xent.linear_cross_entropy(hidden, weight, target, vocab_parallel="tp")
    pair = [group(2), group(2)]
    flat = DeviceMesh.from_group(pair, device().type, mesh=[[0, 1]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"a DeviceMesh of one dimension, got one of 2, \('dp', 'tp'\): pass the one"):
        xent.linear_cross_entropy(hidden, weight, target, vocab_parallel=flat)


PROMISES = {
    function.__name__.strip("_"): function
    for function in (
        _twice,
        _second_derivatives,
        _entropy_changed_in_place,
        _under_no_grad,
        _autocast,
        _layouts,
        _meshes,
    )
}


@pytest.mark.parametrize("name", PROMISES)
def test_promise(pool: Pool, name: str) -> None:
    pool.run(in_pair, PROMISES[name])


def test_error_for_other_frameworks() -> None:
    import numpy as np

    with pytest.raises(TypeError, match=r"vocab_parallel needs PyTorch tensors, .*got numpy arrays: pass the whole"):
        xent.cross_entropy(np.zeros((2, 3)), np.zeros(2, int), vocab_parallel="group")
