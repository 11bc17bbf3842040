"""Add the gradient with respect to class probabilities to a loss that was computed without it.

The loss is computed as usual, with a detached target. Then it passes through one more Function. Its backward pass
passes the upstream gradients on and computes that of the target. So backends, kernels and other Functions need no code
for it.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.autograd import first_order, signed
from xent.backends.torch.options import ARGUMENTS

__all__ = ["asks", "with_target"]

_OF_LOGITS, _OF_LINEAR = 1, 7  # number of arguments of an operation before the target


def asks(target: Tensor) -> bool:
    """Return whether the target requires a gradient."""
    return torch.is_grad_enabled() and target.requires_grad


def with_target(loss: Tensor, nll: Tensor | None, *args: Any) -> tuple[Tensor, Tensor | None]:
    """Return the loss, and the rows' nll if it has gradients, with the gradient of the target added.

    `args` are the arguments of `xent::linear_cross_entropy`, or those of `xent::cross_entropy` without `needs_grad`.
    """
    made = _Target.apply(loss, nll, *args)
    return (made, None) if nll is None else made


class _Target(torch.autograd.Function):
    """(loss, nll, *arguments of a loss) -> (loss, nll), or only the loss if nll is None."""

    @staticmethod
    @signed
    def forward(loss: Tensor, nll: Tensor | None, *args: Any) -> Any:
        return loss.clone() if nll is None else (loss.clone(), nll.clone())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        args = inputs[2:]
        tensors = [value if isinstance(value, Tensor) else None for value in args]
        ctx.others = [None if isinstance(value, Tensor) else value for value in args]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, of_nll: Tensor | None = None) -> Any:
        args = [
            other if tensor is None else tensor for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        grads: list[Tensor | None] = [None] * len(args)
        if of_loss is not None or of_nll is not None:
            linear = len(args) != _OF_LOGITS + ARGUMENTS
            place = _OF_LINEAR if linear else _OF_LOGITS  # of the target among the arguments
            operation = torch.ops.xent.linear_target_gradient if linear else torch.ops.xent.target_gradient
            grads[place] = first_order(operation, *args[:place], of_loss, of_nll, *args[place:])
        return of_loss, of_nll, *grads
