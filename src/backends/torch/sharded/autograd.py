"""Autograd functions around the custom operations on shards, for compilers and modes.

See `xent.backends.torch.autograd`.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.autograd import keep_linear, keep_logits, linear_gradients, logits_gradients
from xent.backends.torch.sharded import ops as _ops  # noqa: F401  registers the operations
from xent.backends.torch.sharded.calls import Where

__all__ = ["ShardedCrossEntropy", "ShardedLinearCrossEntropy"]

_OF_WHERE = len(Where._fields)


class ShardedCrossEntropy(torch.autograd.Function):
    """(logits, needs_grad, *where, *options) -> (loss, kept, *stats)."""

    @staticmethod
    def forward(logits: Tensor, needs_grad: bool, *args: Any) -> Any:
        loss, kept, stats = torch.ops.xent.sharded_cross_entropy(logits, needs_grad, *args)
        return loss, kept, *stats

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        keep_logits(ctx, inputs, output, _OF_WHERE)

    @staticmethod
    def backward(ctx: Any, loss: Tensor | None, kept_upstream: Any, *stats: Any) -> Any:
        return logits_gradients(ctx, torch.ops.xent.sharded_cross_entropy_backward, loss, kept_upstream, stats)


class ShardedLinearCrossEntropy(torch.autograd.Function):
    """(input, weight, bias, needs, shift, workspace, dtype, *where, *options) -> the operation's results, flattened."""

    @staticmethod
    def forward(*args: Any) -> Any:
        loss, deferred, gradients, kept, stats = torch.ops.xent.sharded_linear_cross_entropy(*args)
        return loss, deferred, *gradients, kept, *stats

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        keep_linear(ctx, inputs, output, _OF_WHERE)

    @staticmethod
    def backward(ctx: Any, loss: Tensor | None, *more: Any) -> Any:
        operation = torch.ops.xent.sharded_linear_cross_entropy_backward
        return linear_gradients(ctx, operation, loss, more[:4], more[5:])
