"""Divergences in PyTorch: teachers that require a gradient, and numbers of compiled calls."""

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target


def test_teacher_that_requires_a_gradient_is_an_error(target: Target, tensors: dict[str, Tensor]) -> None:
    logits, hidden, weight = tensors["logits"], tensors["input"], tensors["linear_weight"]
    source, head = tensors["teacher_input"], tensors["teacher_weight"]
    with pytest.raises(ValueError, match=r"teacher requires a gradient, .* run the teacher under torch.no_grad\(\)"):
        xent.divergence(logits, (logits * 2).requires_grad_(), backend=target.name)
    teacher = xent.LinearTeacher(source.clone().requires_grad_(), head)
    with pytest.raises(ValueError, match=r"teacher.input requires a gradient"):
        xent.linear_divergence(hidden, weight, teacher, backend=target.name)
    teacher = xent.LinearTeacher(source, head.clone().requires_grad_())  # trained elsewhere
    assert not xent.linear_divergence(hidden, weight, teacher, backend=target.name).requires_grad


def test_a_compiled_call_checks_its_numbers(target: Target, tensors: dict[str, Tensor]) -> None:
    teacher = tensors["logits"] * 2
    for options, message in (({"temperature": -1.0}, r"temperature must be"), ({"beta": 1.5}, r"beta must be")):
        torch._dynamo.reset()

        def loss(z: Tensor, options: dict[str, float] = options) -> Tensor:
            return xent.divergence(z, teacher, backend=target.name, **options)

        with pytest.raises(ValueError, match=message):
            torch.compile(loss, backend="aot_eager")(tensors["logits"])
