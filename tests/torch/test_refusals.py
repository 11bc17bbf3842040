"""Tensors and transforms that xent does not support raise an error that names the caller's tensors."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import xent
from tests.covering import crossed
from tests.targets import Target

NO_FORWARD_MODE = "{} carries a tangent, and xent computes no forward-mode derivatives"


def loss_of(tensors: dict[str, Tensor], target: Target, name: str) -> Callable[[Tensor], Any]:
    """Return the loss as a function of one of its tensors."""
    if name in ("input", "linear_weight"):
        function, names = xent.linear_cross_entropy, ("input", "linear_weight", "target")
    else:
        function, names = xent.cross_entropy, ("logits", "target", "sample_weight")
    arguments = {key: tensors[key] for key in names}
    return lambda tensor: function(**(arguments | {name: tensor}), backend=target.name)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # JSON, which it then leaves to Python
@pytest.mark.parametrize(
    *crossed(
        costly="compiled",
        name=["logits", "input", "linear_weight"],
        compiled=[False, True],
        how=[
            "hessian",
            "vmap of grad",
            "vmap of grad of grad",
            "grad of vmap",
            "functionalize of grad",
            "grad of functionalize",
        ],
    )
)
def test_nested_transforms_raise(
    target: Target, tensors: dict[str, Tensor], name: str, compiled: bool, how: str
) -> None:
    loss = loss_of(tensors, target, name)
    batch = tensors[name].expand(3, -1, -1)
    no_vmap = f"{name} is batched by torch.vmap, which xent does not support"
    no_functionalize = f"{name} is traced by torch.func.functionalize, which would lose the gradient"
    function, argument, message = {
        "hessian": (torch.func.hessian(loss), tensors[name], NO_FORWARD_MODE.format(name)),
        "vmap of grad": (torch.vmap(torch.func.grad(loss)), batch, no_vmap),
        "vmap of grad of grad": (torch.vmap(torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())), batch, no_vmap),
        "grad of vmap": (torch.func.grad(lambda x: torch.vmap(loss)(x).sum()), batch, no_vmap),
        "functionalize of grad": (torch.func.functionalize(torch.func.grad(loss)), tensors[name], no_functionalize),
        "grad of functionalize": (torch.func.grad(torch.func.functionalize(loss)), tensors[name], no_functionalize),
    }[how]
    if compiled and "functionalize" not in how:  # Dynamo does not trace this
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(function, backend="aot_eager")(argument)
    else:
        with pytest.raises(NotImplementedError, match=message):
            function(argument)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy", "log_probs", "divergence"])
def test_transforms_of_arguments_without_gradient_raise(
    target: Target, tensors: dict[str, Tensor], name: str, backend: str | None
) -> None:
    """They raise like loss.backward(), because zeros would be mistaken for the gradient."""
    torch._dynamo.reset()
    x, w, y = tensors["input"], tensors["linear_weight"], tensors["target"]
    z, option = tensors["logits"], "temperature" if name == "log_probs" else "sample_weight"
    arguments = {"linear_cross_entropy": (x, w, y), "divergence": (z, z * 2)}.get(name, (z, y))

    def loss(weights: Tensor) -> Tensor:
        return getattr(xent, name)(*arguments, backend=target.name, **{option: weights}).sum()

    transformed = torch.func.grad(loss)
    with pytest.raises(Exception, match=f"{option} requires a gradient, which (xent|a divergence) does not"):
        (torch.compile(transformed, backend=backend) if backend else transformed)(tensors["sample_weight"] + 0.1)


@pytest.mark.parametrize("name", ["logits", "input"])
@pytest.mark.parametrize("retain", [False, True])
def test_gradient_carries_the_tangent_of_its_upstream(
    target: Target, tensors: dict[str, Tensor], name: str, retain: bool
) -> None:
    """The gradient is linear in the upstream scalar, and must propagate its tangent."""
    values = tensors[name].requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(tensors, target, name)(values), values)
    with forward_ad.dual_level():
        loss = loss_of(tensors, target, name)(values)
        upstream = forward_ad.make_dual(torch.ones_like(loss), torch.full_like(loss, 3.0))
        (dual,) = torch.autograd.grad(loss, values, upstream, retain_graph=retain)
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, 3 * gradient)


@pytest.mark.parametrize("name", ["logits", "input", "linear_weight", "target", "sample_weight"])
def test_sparse_tensors_raise(target: Target, tensors: dict[str, Tensor], name: str) -> None:
    sparse = tensors[name].to_sparse()
    with pytest.raises(TypeError, match=f"{name} must be a dense tensor, got layout torch.sparse_coo"):
        loss_of(tensors, target, name)(sparse)


def test_nested_tensors_raise(target: Target, tensors: dict[str, Tensor]) -> None:
    jagged = torch.nested.nested_tensor([tensors["logits"][:2], tensors["logits"][2:]], layout=torch.jagged)
    classes = torch.nested.nested_tensor_from_jagged(tensors["target"], jagged.offsets())
    with pytest.raises(TypeError, match="logits must be a dense tensor, got a nested one"):
        xent.cross_entropy(jagged, classes, backend=target.name)
    xent.cross_entropy(jagged.values(), classes.values(), backend=target.name)  # what the error recommends


def test_module_instead_of_its_weight(tensors: dict[str, Tensor]) -> None:
    head = torch.nn.Linear(8, 11)
    with pytest.raises(TypeError, match=r"got Linear .*: pass module\.weight, and linear_bias=module\.bias$"):
        xent.linear_cross_entropy(tensors["input"], head, tensors["target"])
    with pytest.raises(TypeError, match=r"linear_bias must be .*got Linear.*\)$"):
        xent.linear_cross_entropy(tensors["input"], tensors["linear_weight"], tensors["target"], linear_bias=head)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["linear_weight", "teacher.weight"])
def test_a_classifier_of_another_dtype(target: Target, tensors: dict[str, Tensor], name: str, autocast: bool) -> None:
    """Autocast does not convert float64, so the error must not advise it."""
    source, weight = tensors["input"], tensors["linear_weight"]
    arguments = (source, weight.double(), tensors["target"])
    function = xent.linear_cross_entropy
    if name == "teacher.weight":
        function, arguments = xent.linear_divergence, (source, weight, xent.LinearTeacher(source, weight.double()))
    advice = "; torch.autocast does not convert float64" if autocast else ", or call under torch.autocast"
    expected = f"{re.escape(name)} must have the dtype of .*got torch.float64: .*{advice}$"
    # The backend whose kernels compute in float64; others refuse the call before.
    with torch.autocast(target.device, torch.bfloat16, enabled=autocast), pytest.raises(TypeError, match=expected):
        function(*arguments, backend="torch")
    if not autocast:
        bias = torch.zeros(11, device=target.device).double()
        with pytest.raises(TypeError, match=r"linear_bias must have the dtype of input, torch.float32"):
            xent.linear_cross_entropy(source, weight, tensors["target"], linear_bias=bias)


def test_uint64_targets_are_refused(target: Target, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(TypeError, match=r"target must hold class indices .* got dtype uint64"):
        xent.cross_entropy(tensors["logits"], tensors["target"].to(torch.uint64))
