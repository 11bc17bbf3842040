"""Divergences of rows with several blocks, and of rows that are infinite or NaN, against float64."""

from typing import Any

import pytest
import torch

import xent
from tests.covering import crossed
from tests.targets import Target

BLOCK = 4096
V = 2 * BLOCK + 88
"""Rows of two full blocks and a part."""


def which(beta: Any) -> dict[str, Any]:
    """Return the arguments that select a divergence: a beta, or "tv"."""
    return {"kind": "tv"} if beta == "tv" else {"beta": beta}


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9, "tv"])
@pytest.mark.parametrize("place", [3, 5000])
@pytest.mark.parametrize("first", [0.0, -120.0])
def test_equal_distributions(target: Target, beta: Any, place: int, first: float) -> None:
    """Loss and gradient are exactly 0, also if the most probable class is not in the first block."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, V)
    logits[:, :BLOCK] += first
    logits[:, place] = 25
    logits = logits.to(target.device).requires_grad_()
    loss = xent.divergence(logits, logits.detach().clone(), **which(beta), backend=target.name)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not logits.grad.any()


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.7, 1.0, "tv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_unknown_rows_are_nan(target: Target, beta: Any, dtype: torch.dtype, value: float, side: str) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, V)
    (student if side == "student" else teacher)[1, 40] = value
    leaf = student.to(target.device, dtype).requires_grad_()
    other = teacher.to(target.device, dtype)
    loss = xent.divergence(leaf, other, **which(beta), reduction="none", backend=target.name)
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, False]
    assert leaf.grad.isnan().any(-1).tolist() == [False, True, False]


def top_k(logits: torch.Tensor, tail: str) -> xent.TopKTeacher:
    found = torch.log_softmax(logits.double(), -1).topk(5)
    return xent.TopKTeacher(found.indices, found.values.float(), tail=tail)


@pytest.mark.parametrize(
    *crossed(
        kind=[0.0, 0.3, 1.0, "tv", "bucket", "renormalize", "drop", "bucket, tv", "renormalize, tv"],
        dtype=[torch.float32, torch.bfloat16, torch.float16],
        first=["far below", "-inf", "far above", "like the others"],
        options=[{}, {"softcap": 20.0}, {"logit_scale": -0.5}],
    )
)
def test_first_block(target: Target, kind: Any, dtype: torch.dtype, first: str, options: dict[str, float]) -> None:
    """Sums are relative to the largest logit of the first block, unless it is far from the largest of all.

    The kernel for K classes overwrites their logits, but not the caller's, and infinite logits keep their meaning.
    """
    torch.manual_seed(0)
    tail, _, of_tail = str(kind).partition(", ")
    dense = tail not in ("bucket", "renormalize", "drop")
    options = {} if dense and first == "-inf" else options  # a finite student would be infinitely far
    sides = 3 * torch.randn(2, 4, V)
    shift = {"far below": -120.0, "-inf": -torch.inf, "far above": 60.0, "like the others": 0.0}[first]
    sides[:, :3, :BLOCK] += shift
    sides[0, 3, :BLOCK] += shift if shift > -torch.inf else 0
    if first == "-inf" and "logit_scale" in options:
        sides[0, :3, :BLOCK] *= -1
    student, taught = sides.to(target.device, dtype)
    before, teachers = student.clone(), [taught, taught.cpu().double()]
    if not dense:
        known = top_k(torch.cat((torch.full((4, BLOCK), -torch.inf), sides[1, :, BLOCK:]), 1), tail)
        teachers = [xent.TopKTeacher(known.ids.to(target.device), known.log_probs.to(target.device), tail), known]
    call = which("tv" if of_tail else 0.0 if not dense else kind) | {"reduction": "none"} | options

    def found(one: torch.Tensor, other: Any, backend: str) -> list[torch.Tensor]:
        leaf = one.detach().requires_grad_()
        loss = xent.divergence(leaf, other, backend=backend, **call)
        entropy = xent.divergence(one, other, stats=("entropy",), backend=backend, **call)[1].entropy
        return [loss.detach(), entropy, *torch.autograd.grad(loss, leaf, torch.linspace(1, 2, 4).to(loss))]

    made, right = found(student, teachers[0], target.name), found(student.cpu().double(), teachers[1], "torch")
    torch.testing.assert_close(student, before, rtol=0, atol=0)
    close = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[dtype]
    least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # smaller gradients round to 0
    for one, other in zip(made, right, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=close, atol=close * float(other.abs().max()) + least)
