"""The divergence kernels with blocks so small that rows have several, against float64."""

from typing import Any

import pytest
import torch

import xent
from tests.targets import Target
from xent.backends.torch.divergence import loop
from xent.backends.torch.gradients import Gradients
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
    shift = {"far below": -120.0, "-inf": -torch.inf, "far above": 60.0, "like the others": 0.0}[first]
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


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("place", [3, 50])
@pytest.mark.parametrize("first", [0.0, -120.0])
def test_equal_distributions(
    target: Target, monkeypatch: pytest.MonkeyPatch, beta: float, place: int, first: float
) -> None:
    """Loss and gradient are exactly 0, also if the most probable class is not in the first block."""
    monkeypatch.setattr(divergence_job, "_BLOCK", 16)
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 88)
    logits[:, :16] += first
    logits[:, place] = 25
    logits = logits.to(target.device).requires_grad_()
    loss = xent.divergence(logits, logits.detach().clone(), beta=beta, backend=target.name)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not logits.grad.any()


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_unknown_rows_are_nan(target: Target, beta: float, dtype: torch.dtype, value: float, side: str) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 88)
    (student if side == "student" else teacher)[1, 40] = value
    leaf = student.to(target.device, dtype).requires_grad_()
    other = teacher.to(target.device, dtype)
    loss = xent.divergence(leaf, other, beta=beta, reduction="none", backend=target.name)
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, False]
    assert leaf.grad.isnan().any(-1).tolist() == [False, True, False]


def top_k(logits: torch.Tensor, tail: str) -> xent.TopKTeacher:
    found = torch.log_softmax(logits.double(), -1).topk(5)
    return xent.TopKTeacher(found.indices, found.values.float(), tail=tail)


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "drop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("first", ["far below", "-inf", "far above", "like the others"])
@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}, {"logit_scale": -0.5}], ids=str)
def test_top_k(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    tail: str,
    dtype: torch.dtype,
    first: str,
    options: dict[str, float],
) -> None:
    """The kernel overwrites logits of the K classes, but not the caller's, and infinite logits keep their meaning."""
    monkeypatch.setattr(divergence_job, "_BLOCK", 16)
    torch.manual_seed(0)
    student, other = 3 * torch.randn(2, 4, 88)
    student[:3, :16] += {"far below": -120.0, "-inf": -torch.inf, "far above": 60.0, "like the others": 0.0}[first]
    if first == "-inf" and "logit_scale" in options:
        student[:3, :16] *= -1
    student = student.to(target.device, dtype)
    before = student.clone()
    teacher = top_k(torch.cat((torch.full((4, 16), -torch.inf), other[:, 16:]), 1), tail)
    known = xent.TopKTeacher(teacher.ids.to(target.device), teacher.log_probs.to(target.device), tail=tail)

    def found(one: torch.Tensor, other: xent.TopKTeacher, backend: str) -> list[torch.Tensor]:
        call = {"beta": 0.0, "reduction": "none", "backend": backend} | options
        leaf = one.detach().requires_grad_()
        loss = xent.divergence(leaf, other, **call)
        entropy = xent.divergence(one, other, stats=("entropy",), **call)[1].entropy
        return [loss.detach(), entropy, *torch.autograd.grad(loss, leaf, torch.linspace(1, 2, 4).to(loss))]

    made = found(student, known, target.name)
    right = found(student.cpu().double(), teacher, "torch")
    torch.testing.assert_close(student, before, rtol=0, atol=0)
    close = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[dtype]
    for one, other in zip(made, right, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=close, atol=close * float(other.abs().max()))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, "top-k"])
@pytest.mark.parametrize("vocabulary", [88, 83, 4104])
@pytest.mark.parametrize("dead", [False, True])
def test_gradient_over_logits(
    target: Target, monkeypatch: pytest.MonkeyPatch, beta: Any, vocabulary: int, dead: bool
) -> None:
    """The same bits whether the gradient of logits has memory of its own or is written over the logits."""
    if vocabulary < 4104:
        monkeypatch.setattr(divergence_job, "_BLOCK", 16)
    torch.manual_seed(0)
    hidden, other = (torch.randn(6, 16).to(target.device, torch.bfloat16) for _ in range(2))
    weight = torch.randn(vocabulary, 16).to(target.device, torch.bfloat16)
    teacher: Any = xent.LinearTeacher(other, weight)
    if beta == "top-k":
        known = top_k((other @ weight.t()).cpu(), "bucket")
        teacher = xent.TopKTeacher(known.ids.to(target.device), known.log_probs.to(target.device))
    rows = torch.ones(6, device=target.device)
    rows[4] = 0 if dead else 2
    found = []
    add = Gradients.add
    # A copy, because products on CPUs may read beyond a row.
    monkeypatch.setattr(Gradients, "add", lambda self, part, trained, grad: add(self, part, trained, grad.clone()))
    for overlays in (False, True):
        monkeypatch.setattr(loop, "_overlays", lambda call, overlays=overlays: overlays)
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = xent.linear_divergence(
            *leaves,
            teacher,
            beta=0.0 if beta == "top-k" else beta,
            sample_weight=rows,
            workspace=3 * 12 * vocabulary,
            backend=target.name,
        )
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
