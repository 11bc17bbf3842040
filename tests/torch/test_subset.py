"""`xent.Subset` with tensors: values that are checked or not, frozen and trained classifiers, compiled graphs."""

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target
from xent.backends.torch import prepare
from xent.core.call import Activation, Dense, Given

IDS = torch.tensor([5, 0, 7, 3])
WRONG: dict[str, tuple[list[int], type[Exception], str]] = {
    "out of range": ([0, 9, 2, 3], IndexError, r"teacher.ids\[1\] is 9; the teacher's classes are 0 to 8"),
    "again": ([5, 1, 2, 5], ValueError, "teacher.ids of a xent.Subset must hold a class at most once, got 5 again"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_ids(target: Target, name: str) -> None:
    """Ids on a CPU are checked. On an accelerator the host cannot see them, and the result is NaN."""
    ids, error, message = WRONG[name]
    student = torch.zeros(3, 4, device=target.device, requires_grad=True)
    teacher = xent.Subset(torch.zeros(3, 9, device=target.device), torch.tensor(ids, device=target.device))
    if target.looks_at_targets:
        with pytest.raises(error, match=message):
            xent.divergence(student, teacher, backend=target.name)
        return
    loss = xent.divergence(student, teacher, backend=target.name)
    loss.backward()
    assert loss.isnan()
    assert student.grad is not None
    assert student.grad.isnan().all()


@pytest.mark.parametrize("ids", [*(ids for ids, _, _ in WRONG.values()), [-1, 1, 2, 3], IDS.tolist()], ids=str)
def test_teacher_is_nan_without_a_check(ids: list[int]) -> None:
    target = Dense(Given(torch.zeros(3, 9), 1), Activation(0.5), torch.tensor(ids))
    found = prepare._restricted(target, False, torch.float32)
    assert found.source.logits.shape == (3, 4)
    assert bool(found.activation.logit_scale.isnan()) == (ids != IDS.tolist())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_classifier_that_is_a_parameter(target: Target, reduction: str) -> None:
    """It gets no gradient, and a compiled call has the same bits."""
    generator = torch.Generator().manual_seed(0)
    source, weight, head = (torch.randn(size, 6, generator=generator).to(target.device) for size in (3, 9, 4))
    parameter, ids = torch.nn.Parameter(weight), IDS.to(target.device)
    hidden = torch.randn(3, 6, generator=generator).to(target.device)

    def call(hidden: Tensor) -> Tensor:
        teacher = xent.Subset(xent.LinearTeacher(source, parameter), ids)
        loss: Tensor = xent.linear_divergence(hidden, head, teacher, reduction=reduction, backend=target.name)
        return loss

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        leaf = hidden.clone().requires_grad_()
        loss = function(leaf)
        found.append([loss.detach(), *torch.autograd.grad(loss.sum(), leaf)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert parameter.grad is None
