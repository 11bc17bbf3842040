"""Divergences in PyTorch: required gradients, no second derivatives, compilation, and rows without weight."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import xent
from tests.covering import crossed
from tests.targets import Target

REDUCTIONS = ("mean", "sum", "none")
TEACHERS = ("logits", "linear", "bucket")


@pytest.fixture
def tensors(target: Target) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = {
        "input": torch.randn(6, 8, generator=generator),
        "weight": torch.randn(11, 8, generator=generator),
        "bias": torch.randn(11, generator=generator),
        "logits": torch.randn(6, 11, generator=generator) * 2,
        "teacher_input": torch.randn(6, 5, generator=generator),
        "teacher_weight": torch.randn(11, 5, generator=generator),
    }
    return {name: tensor.to(target.device) for name, tensor in drawn.items()}


def teacher_of(tensors: dict[str, Tensor], kind: str) -> Any:
    logits = tensors["teacher_input"] @ tensors["teacher_weight"].t()
    if kind == "linear":
        return xent.LinearTeacher(tensors["teacher_input"], tensors["teacher_weight"])
    if kind == "logits":
        return logits
    log_probs, ids = logits.log_softmax(-1).topk(4)
    return xent.TopKTeacher(ids, log_probs, tail=kind)


def linear(tensors: dict[str, Tensor], target: Target, kind: str = "linear", **options: Any) -> Tensor:
    sides = (tensors["input"], tensors["weight"], teacher_of(tensors, kind))
    made: Tensor = xent.linear_divergence(*sides, linear_bias=tensors["bias"], backend=target.name, **options)
    return made


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("asking", [("input",), ("weight",), ("bias",), ("input", "weight"), ()])
def test_gradients_exist_exactly_where_required(
    target: Target, tensors: dict[str, Tensor], reduction: str, asking: tuple[str, ...]
) -> None:
    students = ("input", "weight", "bias")
    every = tensors | {name: tensors[name].clone().requires_grad_() for name in students}
    linear(every, target, reduction=reduction).sum().backward()
    some = tensors | {name: tensors[name].clone().requires_grad_(name in asking) for name in students}
    loss = linear(some, target, reduction=reduction)
    assert loss.requires_grad == bool(asking)
    if asking:
        loss.sum().backward()
    for name in students:
        if name in asking:
            torch.testing.assert_close(some[name].grad, every[name].grad, rtol=0, atol=0)
        else:
            assert some[name].grad is None


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_entropy_has_no_gradient(target: Target, tensors: dict[str, Tensor], reduction: str, traced: bool) -> None:
    options: dict[str, Any] = {"reduction": reduction, "stats": ("entropy",), "backend": target.name}

    def call(logits: Tensor) -> Any:
        return xent.divergence(logits, teacher_of(tensors, "logits"), **options)

    function = torch.compile(call, backend="eager", fullgraph=True) if traced else call
    loss, stats = function(tensors["logits"].clone().requires_grad_())
    assert (loss.requires_grad, stats.entropy.requires_grad) == (True, False)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", TEACHERS)
def test_second_backward_through_a_retained_graph(
    target: Target, tensors: dict[str, Tensor], reduction: str, kind: str
) -> None:
    leaves = [tensors[name].requires_grad_() for name in ("input", "weight", "bias")]
    loss = linear(tensors, target, kind, reduction=reduction)
    upstream = torch.rand_like(loss)
    passes = [torch.autograd.grad(loss, leaves, upstream, retain_graph=keep) for keep in (True, True, False)]
    for one, other, last in zip(*passes, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        torch.testing.assert_close(one, last, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("is_linear", [False, True])
def test_second_derivative_raises(target: Target, tensors: dict[str, Tensor], reduction: str, is_linear: bool) -> None:
    source = tensors["input" if is_linear else "logits"]

    def loss(z: Tensor) -> Tensor:
        if is_linear:
            return linear(tensors | {"input": z}, target, reduction=reduction).sum()
        made: Tensor = xent.divergence(z, teacher_of(tensors, "logits"), reduction=reduction, backend=target.name)
        return made.sum()

    leaf = source.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="xent computes no second derivatives"):
        torch.autograd.grad(grad.square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(source), grad.detach(), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="xent computes no second derivatives"):
        torch.func.grad(lambda z: torch.func.grad(loss)(z).square().sum())(source)
    with pytest.raises(NotImplementedError, match="carries a tangent"):
        torch.func.jvp(loss, (source,), (source,))


@pytest.mark.parametrize(*crossed(is_linear=[False, True], kind=TEACHERS, reduction=REDUCTIONS))
def test_compiles_whole(target: Target, tensors: dict[str, Tensor], reduction: str, kind: str, is_linear: bool) -> None:
    torch._dynamo.reset()

    def loss(x: Tensor, w: Tensor, heat: float, teacher: Any) -> Tensor:
        options: dict[str, Any] = {"temperature": heat, "reduction": reduction, "backend": target.name}
        if is_linear:
            made, stats = xent.linear_divergence(x * 2, w, teacher, stats=("entropy",), **options)
        else:
            made, stats = xent.divergence((x * 2) @ w.t(), teacher, stats=("entropy",), **options)
        weighed: Tensor = (made.sum() * stats.entropy).mean()
        return weighed

    x, w = (tensors[name].clone().requires_grad_() for name in ("input", "weight"))
    teacher = teacher_of(tensors, kind)
    compiled: Callable[..., Tensor] = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for heat in (1.0, 2.0, 0.7):
        found, expected = compiled(x, w, heat, teacher), loss(x, w, heat, teacher)
        torch.testing.assert_close(found, expected)
        for one, other in zip(torch.autograd.grad(found, (x, w)), torch.autograd.grad(expected, (x, w)), strict=True):
            torch.testing.assert_close(one, other)


def test_func_grad_inside_compile(target: Target, tensors: dict[str, Tensor]) -> None:
    torch._dynamo.reset()

    def gradient(x: Tensor) -> Tensor:
        made: Tensor = torch.func.grad(lambda z: linear(tensors | {"input": z}, target))(x)
        return made

    torch.testing.assert_close(
        torch.compile(gradient, fullgraph=True, backend="eager")(tensors["input"]), gradient(tensors["input"])
    )


@pytest.mark.parametrize("is_linear", [False, True])
def test_fake_tensors(target: Target, tensors: dict[str, Tensor], is_linear: bool) -> None:
    teacher = teacher_of(tensors, "logits")
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(tensor).requires_grad_() for name, tensor in tensors.items()}
        other = mode.from_tensor(teacher)
        if is_linear:
            loss = xent.linear_divergence(fake["input"], fake["weight"], other, reduction="none", backend=target.name)
        else:
            loss = xent.divergence(fake["logits"], other, reduction="none", backend=target.name)
        assert loss.shape == (6,)
        assert loss.dtype == torch.float32
        loss.sum().backward()
    name = "input" if is_linear else "logits"
    assert fake[name].grad is not None
    assert fake[name].grad.shape == fake[name].shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype_of_products(target: Target, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    leaves = [tensors[name].requires_grad_() for name in ("input", "weight", "bias")]
    with torch.autocast(target.device, dtype=dtype):
        loss = linear(tensors, target)
    grads = torch.autograd.grad(loss, leaves)
    narrow = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in tensors.items()}
    with torch.no_grad():
        teacher = teacher_of(tensors, "linear")
    sides = (narrow["input"], narrow["weight"], teacher)
    expected = xent.linear_divergence(*sides, linear_bias=narrow["bias"], backend=target.name)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    others = torch.autograd.grad(expected, [narrow[name] for name in ("input", "weight", "bias")])
    for grad, other, leaf in zip(grads, others, leaves, strict=True):
        assert grad.dtype == leaf.dtype
        torch.testing.assert_close(grad, other.float(), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", TEACHERS)
@pytest.mark.parametrize("workspace", [None, 11 * 4 * 2])
def test_rows_of_weight_0_are_not_read(
    target: Target, tensors: dict[str, Tensor], reduction: str, kind: str, workspace: int | None
) -> None:
    weight = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0, 0.5], device=target.device)
    rows = weight == 0
    student = [tensors[name].clone().requires_grad_() for name in ("input", "weight", "bias")]
    clean = linear(tensors | dict(zip(("input", "weight", "bias"), student, strict=True)), target, kind,
                   sample_weight=weight, reduction=reduction, workspace=workspace)  # fmt: skip
    dirty_tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    teacher = teacher_of(dirty_tensors, kind)
    for tensor in (dirty_tensors["input"], teacher if kind == "logits" else None,
                   teacher.input if kind == "linear" else None,
                   teacher.log_probs if kind == "bucket" else None):  # fmt: skip
        if tensor is not None:
            tensor[rows] = torch.nan
    if kind == "bucket":
        teacher.ids[rows] = 99
    again = [dirty_tensors[name].requires_grad_() for name in ("input", "weight", "bias")]
    dirty = xent.linear_divergence(again[0], again[1], teacher, linear_bias=again[2], sample_weight=weight,
                                   reduction=reduction, workspace=workspace, backend=target.name)  # fmt: skip
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)
    upstream = torch.rand_like(clean)
    grads = torch.autograd.grad(clean, student, upstream), torch.autograd.grad(dirty, again, upstream)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not grads[1][0][rows].any()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_nan_in_logits_of_weight_0(target: Target, tensors: dict[str, Tensor], beta: float) -> None:
    z, t = tensors["logits"].clone(), teacher_of(tensors, "logits").clone()
    weight = torch.tensor([0, 1, 1, 0, 1, 1], dtype=torch.bool, device=target.device)
    z[0] = t[3] = torch.nan
    z.requires_grad_()
    loss = xent.divergence(z, t, beta=beta, sample_weight=weight, reduction="none", backend=target.name)
    (grad,) = torch.autograd.grad(loss.sum(), z)
    assert loss.isfinite().all()
    assert grad.isfinite().all()
    assert not grad[~weight].any()
    assert grad[weight].any(-1).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("is_linear", [False, True])
def test_all_weights_0(target: Target, tensors: dict[str, Tensor], reduction: str, is_linear: bool) -> None:
    weight = torch.zeros(6, device=target.device)
    leaf = tensors["input" if is_linear else "logits"].requires_grad_()
    if is_linear:
        loss = linear(tensors, target, sample_weight=weight, reduction=reduction)
    else:
        options: dict[str, Any] = {"sample_weight": weight, "reduction": reduction, "backend": target.name}
        loss = xent.divergence(leaf, teacher_of(tensors, "logits"), **options)
    assert not loss.any()
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    assert not grad.any()
    assert grad.shape == leaf.shape


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_equal_distributions(target: Target, tensors: dict[str, Tensor], beta: float) -> None:
    z = tensors["logits"].requires_grad_()
    loss = xent.divergence(z, z.detach() + 3.0, beta=beta, reduction="none", backend=target.name)
    assert (loss >= 0).all()
    assert (loss < 1e-12).all()
    same = xent.divergence(z, z.detach(), beta=beta, reduction="none", backend=target.name)
    (grad,) = torch.autograd.grad(same.sum(), z)
    assert not same.any()
    assert not grad.any()
    teacher = xent.LinearTeacher(tensors["input"], tensors["weight"], tensors["bias"])
    x = tensors["input"].clone().requires_grad_()
    arguments = {"linear_bias": tensors["bias"], "beta": beta, "backend": target.name}
    equal = xent.linear_divergence(x, tensors["weight"], teacher, **arguments)
    assert not equal.any()
    assert not torch.autograd.grad(equal, x)[0].any()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_far_distributions_stay_finite(target: Target, beta: float) -> None:
    z = torch.tensor([[200.0, -200.0, 0.0], [0.0, 0.0, 90.0]], device=target.device, requires_grad=True)
    t = torch.tensor([[-200.0, 200.0, 0.0], [0.0, 90.0, 0.0]], device=target.device)
    loss = xent.divergence(z, t, beta=beta, reduction="none", backend=target.name)
    (grad,) = torch.autograd.grad(loss.sum(), z)
    expected = {0.0: [400.0, 90.0], 1.0: [400.0, 90.0], 0.5: [0.6931472, 0.6931472]}[beta]
    torch.testing.assert_close(loss.cpu(), torch.tensor(expected))
    assert grad.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_classes_that_one_side_excludes(target: Target, beta: float) -> None:
    inf = float("inf")
    z = torch.tensor([[1.0, -inf, 0.0, -inf]], device=target.device, requires_grad=True)
    t = torch.tensor([[-1.0, 0.5, 0.25, -inf]], device=target.device)
    for student, teacher, finite in ((z, t, beta != 0), (t.clone().requires_grad_(), z.detach(), beta != 1)):
        loss = xent.divergence(student, teacher, beta=beta, backend=target.name)
        assert bool(loss.isfinite()) == finite
        if finite:
            (grad,) = torch.autograd.grad(loss, student)
            assert grad.isfinite().all()
            assert abs(float(grad.sum())) < 1e-6


def test_teacher_that_requires_a_gradient_is_an_error(target: Target, tensors: dict[str, Tensor]) -> None:
    teacher = teacher_of(tensors, "logits")
    with pytest.raises(ValueError, match=r"teacher requires a gradient, .* run the teacher under torch.no_grad\(\)"):
        xent.divergence(tensors["logits"], teacher.requires_grad_(), backend=target.name)
    with pytest.raises(ValueError, match=r"teacher.input requires a gradient"):
        linear(tensors | {"teacher_input": tensors["teacher_input"].clone().requires_grad_()}, target)
    trained_elsewhere = tensors | {"teacher_weight": tensors["teacher_weight"].clone().requires_grad_()}
    assert not linear(trained_elsewhere, target).requires_grad


@pytest.mark.parametrize("layout", ["axis 1", "transposed", "expanded", "sliced"])
def test_any_strides(target: Target, tensors: dict[str, Tensor], layout: str) -> None:
    z, t, axis = tensors["logits"].view(2, 3, 11), teacher_of(tensors, "logits").view(2, 3, 11), -1
    if layout == "axis 1":
        given, other, axis = z.movedim(-1, 1), t.movedim(-1, 1), 1
    elif layout == "transposed":
        given, other = (each.movedim(-1, 0).contiguous().movedim(0, -1) for each in (z, t))
    elif layout == "sliced":
        given, other = (torch.stack([each, each], -1)[..., 0] for each in (z, t))
    else:
        z, t = z[:1].repeat(2, 1, 1), t[:, :1].repeat(1, 3, 1)
        given, other = z[:1].expand(2, 3, 11), t[:, :1].expand(2, 3, 11)
    weight = torch.tensor([[1.0, 0.0, 2.0], [1.0, 1.0, 0.5]], device=target.device)
    results = []
    for student, teacher, where in ((z.contiguous(), t.contiguous(), -1), (given, other, axis)):
        leaf = student.detach().requires_grad_()
        loss = xent.divergence(leaf, teacher, axis=where, sample_weight=weight, reduction="none", backend=target.name)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        results.append((loss, grad.movedim(where, -1)))
    for one, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-7)


def test_inputs_are_unchanged(target: Target, tensors: dict[str, Tensor]) -> None:
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    x, z = tensors["input"].requires_grad_(), tensors["logits"].requires_grad_()
    linear(tensors, target).backward()
    xent.divergence(z, teacher_of(tensors, "bucket"), backend=target.name).backward()
    for name, tensor in before.items():
        assert torch.equal(tensor, tensors[name])
    assert x.grad is not None


def test_bfloat16_logits_of_both_sides_are_exact(target: Target) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(16, 64, device=target.device), torch.randn(301, 64, device=target.device) / 2
    x, w = x.bfloat16(), w.bfloat16()
    other = (w.float() * 1.01).bfloat16()
    z, t = (x.double() @ each.double().t() for each in (w, other))
    truth = (t.softmax(-1) * (t.log_softmax(-1) - z.log_softmax(-1))).sum(-1)
    found = xent.linear_divergence(x, w, xent.LinearTeacher(x, other), reduction="none", backend=target.name)
    torch.testing.assert_close(found.double(), truth, rtol=1e-3, atol=0)


def test_a_compiled_call_checks_its_numbers(target: Target, tensors: dict[str, Tensor]) -> None:
    teacher = teacher_of(tensors, "logits")
    for options, message in (({"temperature": -1.0}, r"temperature must be"), ({"beta": 1.5}, r"beta must be")):
        torch._dynamo.reset()

        def loss(z: Tensor, options: dict[str, float] = options) -> Tensor:
            made: Tensor = xent.divergence(z, teacher, backend=target.name, **options)
            return made

        with pytest.raises(ValueError, match=message):
            torch.compile(loss, backend="aot_eager")(tensors["logits"])
