"""Gives a loss that is there already its gradient with respect to class probabilities.

The loss comes from whatever computes such calls, with a target that asks for nothing. Here it passes through one more
Function, whose backward hands the upstream gradients on and computes the target's. So no backend, no kernel and none of
their own Functions knows of it.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.autograd import first_order, signed
from xent.backends.torch.options import ARGUMENTS

__all__ = ["asks", "with_target"]

_OF_LOGITS, _OF_LINEAR = 1, 7  # so many arguments of an operation come before the target


def asks(target: Tensor) -> bool:
    """Return whether a gradient of the target is asked for."""
    return torch.is_grad_enabled() and target.requires_grad


def with_target(loss: Tensor, nll: Tensor | None, *args: Any) -> tuple[Tensor, Tensor | None]:
    """Return a loss, and the rows' nll where that carries a gradient, with the gradient of the target.

    `args` are what `xent::linear_cross_entropy` takes, or `xent::cross_entropy` without `needs_grad`.
    """
    made = _Target.apply(loss, nll, *args)
    return (made, None) if nll is None else made


def _first(args: Any) -> int:
    """Return the place of the target."""
    return _OF_LOGITS if len(args) == _OF_LOGITS + ARGUMENTS else _OF_LINEAR


class _Target(torch.autograd.Function):
    """(loss, nll, *arguments of a loss) -> (loss, nll), or the loss alone where nll is None."""

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
            place = _first(args)
            linear = place == _OF_LINEAR
            operation = torch.ops.xent.linear_target_gradient if linear else torch.ops.xent.target_gradient
            grads[place] = first_order(operation, *args[:place], of_loss, of_nll, *args[place:])
        return of_loss, of_nll, *grads
