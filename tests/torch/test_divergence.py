"""Divergences in PyTorch: compilation, torch.func, autocast, and what requires a gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.covering import crossed
from tests.targets import Target

REDUCTIONS = ("mean", "sum", "none")
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


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_entropy_has_no_gradient(target: Target, tensors: dict[str, Tensor], reduction: str, traced: bool) -> None:
    options = {"reduction": reduction, "stats": ("entropy",), "backend": target.name}

    def call(logits: Tensor) -> Any:
        return xent.divergence(logits, teacher_of(tensors, "logits"), **options)

    function = torch.compile(call, backend="eager", fullgraph=True) if traced else call
    loss, stats = function(tensors["logits"].clone().requires_grad_())
    assert (loss.requires_grad, stats.entropy.requires_grad) == (True, False)


@pytest.mark.parametrize(*crossed(is_linear=[False, True], kind=TEACHERS, reduction=REDUCTIONS))
def test_compiles_whole(target: Target, tensors: dict[str, Tensor], reduction: str, kind: str, is_linear: bool) -> None:
    torch._dynamo.reset()

    def loss(x: Tensor, w: Tensor, heat: float, teacher: Any) -> Tensor:
        options = {"temperature": heat, "reduction": reduction, "backend": target.name}
        if is_linear:
            made, stats = xent.linear_divergence(x * 2, w, teacher, stats=("entropy",), **options)
        else:
            made, stats = xent.divergence((x * 2) @ w.t(), teacher, stats=("entropy",), **options)
        return (made.sum() * stats.entropy).mean()

    x, w = (tensors[name].clone().requires_grad_() for name in ("input", "linear_weight"))
    teacher = teacher_of(tensors, kind)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for heat in (1.0, 2.0, 0.7):
        found, expected = compiled(x, w, heat, teacher), loss(x, w, heat, teacher)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, (x, w)), torch.autograd.grad(expected, (x, w)))


def test_func_grad_inside_compile(target: Target, tensors: dict[str, Tensor]) -> None:
    torch._dynamo.reset()

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda z: linear(tensors | {"input": z}, target))(x)

    torch.testing.assert_close(
        torch.compile(gradient, fullgraph=True, backend="eager")(tensors["input"]), gradient(tensors["input"])
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype_of_products(target: Target, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    leaves = [tensors[name].requires_grad_() for name in ("input", "linear_weight", "linear_bias")]
    with torch.autocast(target.device, dtype=dtype):
        loss = linear(tensors, target)
    grads = torch.autograd.grad(loss, leaves)
    narrow = {
        name: tensor.detach().to(dtype).requires_grad_()
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }
    with torch.no_grad():
        teacher = teacher_of(tensors, "linear")
    sides = (narrow["input"], narrow["linear_weight"], teacher)
    expected = xent.linear_divergence(*sides, linear_bias=narrow["linear_bias"], backend=target.name)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    others = torch.autograd.grad(expected, [narrow[name] for name in ("input", "linear_weight", "linear_bias")])
    for grad, other, leaf in zip(grads, others, leaves, strict=True):
        assert grad.dtype == leaf.dtype
        torch.testing.assert_close(grad, other.float(), rtol=0.02, atol=1e-3)


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
