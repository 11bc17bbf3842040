"""How far each loss is from the exact answer, which float64 stands for.

Two training runs drift apart by rounding alone, whichever is more exact. So both losses are also held against the same
computation in float64, on the hidden states of the trained model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from demo.losses import Loss, pytorch_loss

__all__ = ["Errors", "errors"]


@dataclass(frozen=True)
class Errors:
    """Relative distance from float64: of the loss, and in the Euclidean norm of the two gradients."""

    loss: float
    hidden_gradient: float
    weight_gradient: float


def errors(losses: dict[str, Loss], hidden: Tensor, weight: Tensor, target: Tensor) -> dict[str, Errors]:
    """Measure each loss on the same hidden states (..., width), classifier and targets.

    The exact answer is computed on the CPU, because not every accelerator has float64.
    """
    exact = _loss_and_gradients(pytorch_loss, hidden.cpu().double(), weight.cpu().double(), target.cpu())
    return {
        name: Errors(*map(_relative, _loss_and_gradients(loss, hidden, weight, target), exact))
        for name, loss in losses.items()
    }


def _loss_and_gradients(loss: Loss, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (leaf.detach().requires_grad_() for leaf in (hidden, weight))
    value = loss(hidden, weight, target)
    hidden_gradient, weight_gradient = torch.autograd.grad(value, (hidden, weight))
    return value.detach(), hidden_gradient, weight_gradient


def _relative(got: Tensor, exact: Tensor) -> float:
    return float((got.cpu().double() - exact).norm() / exact.norm())
