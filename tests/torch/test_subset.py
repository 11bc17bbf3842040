"""`xent.Subset` with tensors: values that are checked or not, frozen and trained classifiers, compiled graphs."""

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target

IDS = torch.tensor([5, 0, 7, 3])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_classifier_that_is_a_parameter(target: Target, reduction: str) -> None:
    """It gets no gradient, and a compiled call has the same bits."""
    generator = torch.Generator().manual_seed(0)
    source, weight, head = (torch.randn(size, 6, generator=generator).to(target.device) for size in (3, 9, 4))
    parameter, ids = torch.nn.Parameter(weight), IDS.to(target.device)
    hidden = torch.randn(3, 6, generator=generator).to(target.device)

    def call(hidden: Tensor) -> Tensor:
        teacher = xent.Subset(xent.LinearTeacher(source, parameter), ids)
        return xent.linear_divergence(hidden, head, teacher, reduction=reduction, backend=target.name)

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        leaf = hidden.clone().requires_grad_()
        loss = function(leaf)
        found.append([loss.detach(), *torch.autograd.grad(loss.sum(), leaf)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert parameter.grad is None
