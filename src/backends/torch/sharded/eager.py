"""Eager calls on shards, without tracers, transforms or modes: `xent.backends.torch.eager.Passes`.

The backward pass of a reduced loss scales the gradients from the forward pass. They have been summed over ranks
already, because the upstream gradient is the same on all ranks.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.eager import as_arguments, on_device
from xent.backends.torch.job import Upstream
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options, pack
from xent.backends.torch.sharded.calls import (
    Where,
    linear_backward,
    linear_forward,
    logits_backward,
    logits_forward,
)

__all__ = ["ShardPasses"]


class ShardPasses:
    """`Passes` on the classes of one rank."""

    keeps_entropy = False

    def __init__(self, where: Where) -> None:
        self._where = where

    def logits_forward(self, logits: Tensor, grad: Tensor | None, keeps: bool, options: Options) -> Any:
        """See `Passes`."""
        return on_device(logits, logits_forward, logits, grad, keeps, self._where, options)

    def logits_backward(self, upstream: Upstream, simple: bool, inplace: bool, logits: Tensor, *saved: Any) -> Tensor:
        """See `Passes`."""
        kept, _, options = saved
        made: Tensor
        if simple:
            made = on_device(logits, logits_backward, upstream, logits, kept, self._where, options, inplace)
        else:
            arguments = (logits, kept, *upstream, *self._where, *pack(options))
            made = torch.ops.xent.sharded_cross_entropy_backward(*arguments)
        return made

    def linear_forward(self, linear: Linear, options: Options) -> Any:
        """See `Passes`."""
        keeps = any(linear.needs) and options.spec.reduction == "none"
        arguments = (linear, keeps, self._where, options)
        loss, deferred, kept, made, stats = on_device(linear.input, linear_forward, *arguments)
        return loss, deferred, made, stats, kept

    def linear_backward(self, upstream: Upstream, simple: bool, linear: Linear, *saved: Any) -> Any:
        """See `Passes`."""
        kept, _, options = saved
        if simple:
            return on_device(linear.input, linear_backward, upstream, linear, kept, self._where, options)
        arguments = (*as_arguments(linear), kept, *upstream, *self._where, *pack(options))
        return torch.ops.xent.sharded_linear_cross_entropy_backward(*arguments)
