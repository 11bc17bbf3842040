"""The divergence kernels with blocks so small that rows have several, against float64."""

import pytest
import torch

import xent
from tests.targets import Target
from xent.backends.triton import divergence_job


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", ["far below", "-inf", "far above", "like the others"])
def test_first_block(
    target: Target, monkeypatch: pytest.MonkeyPatch, beta: float, dtype: torch.dtype, first: str
) -> None:
    """Sums are relative to the largest logit of the first block, unless it is far from the largest of all."""
    monkeypatch.setattr(divergence_job, "_BLOCK", 16)
    torch.manual_seed(0)
    sides = 3 * torch.randn(2, 4, 88)
    shift = {"far below": -60.0, "-inf": -torch.inf, "far above": 60.0, "like the others": 0.0}[first]
    sides[:, :3, :16] += shift
    sides[0, 3, :16] += shift if shift > -torch.inf else 0
    student, teacher = sides.to(target.device, dtype)

    def found(one: torch.Tensor, other: torch.Tensor, backend: str) -> list[torch.Tensor]:
        leaf = one.detach().requires_grad_()
        loss = xent.divergence(leaf, other, beta=beta, reduction="none", backend=backend)
        return [loss.detach(), *torch.autograd.grad(loss, leaf, torch.linspace(1, 2, 4).to(loss))]

    made = found(student, teacher, target.name)
    right = found(student.cpu().double(), teacher.cpu().double(), "torch")
    close = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7}[dtype]
    for one, other in zip(made, right, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=close, atol=close * float(other.abs().max()))
