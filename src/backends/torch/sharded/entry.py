"""The entry from the driver: convert the description of the shard for functions and operations, and select autograd."""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import eager, private
from xent.backends.torch.autograd import asks_for_gradient
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options, pack
from xent.backends.torch.sharded import plain as _plain  # noqa: F401  registers the steps
from xent.backends.torch.sharded.autograd import ShardedCrossEntropy, ShardedLinearCrossEntropy
from xent.backends.torch.sharded.calls import Where
from xent.backends.torch.sharded.eager import ShardPasses
from xent.backends.torch.sharded.peers import group_of
from xent.backends.torch.sharded.tokens import piece
from xent.core.spec import Shards

__all__ = ["cross_entropy", "linear_cross_entropy"]


def cross_entropy(
    logits: Tensor, options: Options, shards: Shards, inplace: bool, quiet: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return loss and statistics of logits (..., V_r). `quiet`: no tracer or mode is active, and tensors are plain."""
    _refuse_transforms()
    where = _where(shards, -1)
    needs_grad = asks_for_gradient(logits)[0]
    if quiet:
        return eager.cross_entropy(logits, options, needs_grad, inplace, ShardPasses(where))
    if needs_grad:
        loss, _, *stats = ShardedCrossEntropy.apply(logits, True, *where, *pack(options))
    else:
        loss, _, stats = torch.ops.xent.sharded_cross_entropy(logits, False, *where, *pack(options))
    return loss, stats


def linear_cross_entropy(linear: Linear, options: Options, shards: Shards, quiet: bool) -> tuple[Tensor, list[Tensor]]:
    """Return loss and statistics of hidden states and a classifier's shard."""
    _refuse_transforms()
    axis = -1
    if shards.axis is not None:
        axis = shards.axis % linear.input.dim()
        _check_tokens(linear.input.shape, options.target.shape, axis, group_of(shards.group))
    where = _where(shards, axis)
    if quiet:
        return eager.linear_cross_entropy(linear, options, ShardPasses(where))
    sources = (linear.input, linear.weight, linear.bias, list(linear.needs), linear.shift, linear.workspace)
    arguments = (*sources, linear.compute, *where, *pack(options))
    if any(linear.needs):
        loss, _, _, _, _, _, *stats = ShardedLinearCrossEntropy.apply(*arguments)
    else:
        loss, _, _, _, stats = torch.ops.xent.sharded_linear_cross_entropy(*arguments)
    return loss, stats


def _where(shards: Shards, axis: int) -> Where:
    first, size = (-1 if value is None else int(value) for value in (shards.first, shards.size))
    return Where(group_of(shards.group).group_name, first, size, axis, shards.reduces)


def _check_tokens(mine: torch.Size, whole: torch.Size, axis: int, group: Any) -> None:
    """Raise an error for an input that does not have this rank's tokens."""
    ranks, rank = group.size(), group.rank()
    start, stop = piece(whole[axis], ranks, rank)
    if mine[axis] != stop - start:
        raise ValueError(
            f"with sequence_parallel, {whole[axis]} tokens on {ranks} ranks are cut as torch.chunk cuts them: this "
            f"rank should have {stop - start}, tokens [{start}, {stop}), and its input has {mine[axis]}"
        )


def _refuse_transforms() -> None:
    if private.transforms_active():
        raise NotImplementedError(
            "a vocabulary in shards does not go through torch.func transforms, which cannot follow what crosses ranks: "
            "use backward() or torch.autograd.grad"
        )
