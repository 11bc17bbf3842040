"""Compare each loss with the same computation in float64.

Two training runs diverge by rounding alone, so their difference does not show which is more accurate. Both losses are
therefore compared with float64 on the hidden states of the trained model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from demo.losses import Loss, pytorch_loss

__all__ = ["Errors", "errors"]


@dataclass(frozen=True)
class Errors:
    """Relative errors against float64: of the loss, and of the two gradients in the Euclidean norm."""

    loss: float
    hidden_gradient: float
    weight_gradient: float


def errors(losses: dict[str, Loss], hidden: Tensor, weight: Tensor, target: Tensor) -> dict[str, Errors]:
    """Measure each loss on the same hidden states (..., width), classifier and targets.

    float64 is computed on the CPU, because not every accelerator has it.
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
