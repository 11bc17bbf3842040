"""Divergences in PyTorch: compilation, torch.func, autocast, and what requires a gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target

TEACHERS = ("logits", "linear", "bucket")


def teacher_of(tensors: dict[str, Tensor], kind: str) -> Any:
    logits = tensors["teacher_input"] @ tensors["teacher_weight"].t()
    if kind == "linear":
        return xent.LinearTeacher(tensors["teacher_input"], tensors["teacher_weight"])
    if kind == "logits":
        return logits
    log_probs, ids = logits.log_softmax(-1).topk(4)
    return xent.TopKTeacher(ids, log_probs, tail=kind)


def linear(tensors: dict[str, Tensor], target: Target, kind: str = "linear", **options: Any) -> Tensor:
    sides = (tensors["input"], tensors["linear_weight"], teacher_of(tensors, kind))
    return xent.linear_divergence(*sides, linear_bias=tensors["linear_bias"], backend=target.name, **options)


def test_teacher_that_requires_a_gradient_is_an_error(target: Target, tensors: dict[str, Tensor]) -> None:
    teacher = teacher_of(tensors, "logits")
    with pytest.raises(ValueError, match=r"teacher requires a gradient, .* run the teacher under torch.no_grad\(\)"):
        xent.divergence(tensors["logits"], teacher.requires_grad_(), backend=target.name)
    with pytest.raises(ValueError, match=r"teacher.input requires a gradient"):
        linear(tensors | {"teacher_input": tensors["teacher_input"].clone().requires_grad_()}, target)
    trained_elsewhere = tensors | {"teacher_weight": tensors["teacher_weight"].clone().requires_grad_()}
    assert not linear(trained_elsewhere, target).requires_grad


def test_a_compiled_call_checks_its_numbers(target: Target, tensors: dict[str, Tensor]) -> None:
    teacher = teacher_of(tensors, "logits")
    for options, message in (({"temperature": -1.0}, r"temperature must be"), ({"beta": 1.5}, r"beta must be")):
        torch._dynamo.reset()

        def loss(z: Tensor, options: dict[str, float] = options) -> Tensor:
            return xent.divergence(z, teacher, backend=target.name, **options)

        with pytest.raises(ValueError, match=message):
            torch.compile(loss, backend="aot_eager")(tensors["logits"])
