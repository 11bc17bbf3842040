"""The two losses that the demo compares: the same mean cross entropy, computed in two ways."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

import xent

__all__ = ["LOSSES", "PYTORCH", "XENT", "Loss"]

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden states (..., width), classifier (vocabulary, width), targets (...)) -> mean loss"""

PYTORCH = "PyTorch"
XENT = "xent"


def pytorch_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Compute all logits, then their cross entropy, as a training script does without xent."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def xent_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Compute the same in one call, without storing all logits."""
    loss: Tensor = xent.linear_cross_entropy(hidden, weight, target, backend="auto")
    return loss


LOSSES: dict[str, Loss] = {PYTORCH: pytorch_loss, XENT: xent_loss}
