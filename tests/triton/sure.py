"""Very probable targets of `linear_cross_entropy` in bfloat16: their gradient is 1 - p, from an unrounded logit."""

import torch

import xent
from tests.targets import Target

__all__ = ["check_sure_targets"]


def check_sure_targets(target: Target, rows: int, workspace: int) -> None:
    """Compare the gradients of such rows, with 67 classes, with float64.

    With rounded target logits they would be far off.
    """
    torch.manual_seed(0)
    weight, classes = torch.randn(67, 24).bfloat16(), torch.arange(rows)
    hidden = (weight[classes] * 20 / weight[classes].float().square().sum(-1, keepdim=True)).bfloat16()
    wide = [value.double().requires_grad_() for value in (hidden, weight)]
    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(wide[0] @ wide[1].t(), classes), wide)
    leaves = [value.to(target.device).requires_grad_() for value in (hidden, weight)]
    loss = xent.linear_cross_entropy(*leaves, classes.to(target.device), workspace=workspace, backend=target.name)
    for found, right in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        assert (found.cpu().double() - right).norm() <= 0.1 * right.norm()
