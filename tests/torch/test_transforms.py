"""Every function, and every argument that can be trained, under torch.func, torch.compile, vmap and autocast."""

from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.covering import crossed
from tests.targets import Target


def calls_of(target: Target) -> tuple[dict[str, Callable[..., Tensor]], dict[str, Tensor]]:
    """Return functions of hidden states, classifier, and scale or probabilities; and these tensors."""
    generator = torch.Generator().manual_seed(0)
    x, w, teacher, wide = (
        torch.randn(size, generator=generator).to(target.device) for size in ((6, 8), (11, 8), (6, 11), (6, 8))
    )
    classes = torch.tensor([0, 3, -100, 10, 7, 7], device=target.device)
    top = teacher.log_softmax(-1).topk(4)
    known = xent.TopKTeacher(top.indices, top.values)
    taught = xent.LinearTeacher(wide, w.flip(0))
    part = xent.Subset(
        xent.LinearTeacher(wide, torch.nn.Parameter(wide.repeat(3, 1))), classes.new_tensor(range(4, 15))
    )
    ids = torch.arange(11, device=target.device).repeat(6)
    support = xent.Support(ids, torch.arange(0, 67, 11, device=target.device))
    mean: dict[str, Any] = {"backend": target.name}
    none = mean | {"reduction": "none"}
    heads = {"shift": (1, 2), "workspace": 99}
    loss, linear, divergence = xent.cross_entropy, xent.linear_cross_entropy, xent.linear_divergence

    def squared(x: Tensor, w: Tensor, q: Tensor) -> Tensor:
        rows, stats = linear(x, w, q, stats=("nll",), **none)
        return rows + stats.nll**2

    def headed(x: Tensor, w: Tensor, target: Tensor = classes) -> Tensor:
        rows, stats = linear(torch.stack([x, 2 * x]), w, target, stats=("lse", "accuracy", "count"), **heads, **none)
        return rows + stats.lse**2 * stats.accuracy + stats.count

    def apart(x: Tensor, w: Tensor) -> Tensor:
        """Return rows and a function of the entropy, which has no gradient."""
        rows, stats = xent.divergence(x @ w.t(), teacher, beta=0.3, stats=("entropy",), **none)
        assert not stats.entropy.requires_grad
        return rows + stats.entropy**2

    of_two: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "cross_entropy": lambda x, w: loss(x @ w.t(), classes, **none),
        "cross_entropy, mean": lambda x, w: loss(x @ w.t(), classes, **mean),
        "linear_cross_entropy": lambda x, w: linear(x, w, classes, workspace=99, **none),
        "linear_cross_entropy, mean": lambda x, w: linear(x, w, classes, **mean),
        "heads": headed,
        "heads, mean": lambda x, w: linear(torch.stack([x, 2 * x]), w, classes, head_weight=(1, 0.5), **heads, **mean),
        "log_probs": lambda x, w: xent.log_probs(x @ w.t(), classes, **mean),
        "linear_log_probs": lambda x, w: xent.linear_log_probs(x, w, classes, **mean),
        "linear_log_probs, entropy": lambda x, w: xent.linear_log_probs(x, w, classes, entropy=True, **mean)[1],
        "log_probs, support": lambda x, w: xent.log_probs(x @ w.t(), classes, support=support, **mean),
        "divergence": apart,
        "linear_divergence": lambda x, w: divergence(x, w, teacher, **none),
        "linear_divergence, mean": lambda x, w: divergence(x, w, taught, beta=1.0, temperature=0.7, **mean),
        "linear_divergence, top k": lambda x, w: divergence(x, w, known, **none),
        "linear_divergence, subset": lambda x, w: divergence(x, w, part, **none),
    }
    of_scale: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "scale": lambda x, w, s: loss(x @ w.t(), classes, logit_scale=s.exp(), softcap=3.0, **none),
        "scale, linear, mean": lambda x, w, s: linear(x, w, classes, logit_scale=s.exp(), workspace=99, **mean),
    }
    of_target: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "probabilities": lambda x, w, q: loss(x @ w.t(), q, **none),
        "probabilities, mean": lambda x, w, q: loss(x @ w.t(), q, **mean),
        "probabilities, linear": squared,
        "probabilities, heads": headed,
    }
    tensors = {"x": x, "w": w, "scale": torch.tensor(-0.3, device=target.device), "probabilities": teacher.softmax(-1)}
    return of_two | of_scale | of_target, tensors


NAMES = list(calls_of(Target("torch", "cpu"))[0])


def arguments_of(name: str) -> tuple[str, ...]:
    return ("x", "w", *(third for third in ("scale", "probabilities") if third in name))


def call_of(target: Target, name: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    torch._dynamo.reset()
    functions, tensors = calls_of(target)
    return functions[name], [tensors[argument].clone().requires_grad_() for argument in arguments_of(name)]


def upstream_of(loss: Tensor, *more: int) -> Tensor:
    return torch.randn((*more, *loss.shape), generator=torch.Generator().manual_seed(2)).to(loss)


@pytest.mark.parametrize("name", NAMES)
def test_batched_gradients(target: Target, name: str) -> None:
    function, leaves = call_of(target, name)
    loss = function(*leaves)
    upstreams = upstream_of(loss, 3)
    each = [torch.autograd.grad(loss, leaves, one, retain_graph=True) for one in upstreams]
    found = torch.func.vmap(lambda one: torch.autograd.grad(loss, leaves, one, retain_graph=True))(upstreams)
    for number, grad in enumerate(found):
        torch.testing.assert_close(grad, torch.stack([one[number] for one in each]))


def test_batch_of_upstream_gradients_is_refused(target: Target) -> None:
    """PyTorch would say that the backward pass has no batching rule."""
    x, y = torch.randn(3, 5, device=target.device, requires_grad=True), torch.tensor([0, 1, 2], device=target.device)
    loss = xent.cross_entropy(x, y, reduction="none", backend=target.name)
    with pytest.raises(NotImplementedError, match="once per upstream gradient"):
        torch.autograd.grad(loss, x, torch.eye(3, device=target.device), is_grads_batched=True)


def test_compiles_whole(target: Target) -> None:
    """All of them in one graph, also with other values. A second backward pass has the same gradients."""
    torch._dynamo.reset()
    functions, tensors = calls_of(target)

    def every(leaves: dict[str, Tensor]) -> list[Tensor]:
        return [call(*(leaves[argument] for argument in arguments_of(name))) for name, call in functions.items()]

    compiled = torch.compile(every, fullgraph=True, backend="aot_eager")
    for factor in (1.0, 0.5):
        leaves = {name: (factor * tensor).detach().requires_grad_() for name, tensor in tensors.items()}
        some = list(leaves.values())
        found, expected = compiled(leaves), every(leaves)
        torch.testing.assert_close(found, expected)
        upstream = [upstream_of(one) for one in expected]
        wanted = torch.autograd.grad(expected, some, upstream)
        for retain in (True, False):
            torch.testing.assert_close(torch.autograd.grad(found, some, upstream, retain_graph=retain), wanted)


def transformed(how: str, function: Callable[..., Tensor], numbers: tuple[int, ...]) -> Callable[..., Any]:
    """Return the gradients of the sum, or all derivatives, as a function of the tensors."""

    def total(*tensors: Tensor) -> Tensor:
        return function(*tensors).sum()

    def vjp(*tensors: Tensor) -> Any:
        value, pull = torch.func.vjp(total, *tensors)
        return pull(torch.ones_like(value))

    return {
        "grad": torch.func.grad(total, numbers),
        "vjp": vjp,
        "grad_and_value": lambda *tensors: torch.func.grad_and_value(total, numbers)(*tensors)[0],
        "jacrev": torch.func.jacrev(function, numbers),
    }[how]


HOW = ["grad", "vjp", "grad_and_value", "jacrev"]
EAGER = crossed(name=NAMES, how=HOW, compiled=[None], asks=[False, True])
COMPILED = [
    (name, *rest) for name, rest in zip(NAMES, cycle(product(HOW, ["eager", "aot_eager"], [True, False])), strict=False)
]


@pytest.mark.parametrize(EAGER[0], EAGER[1] + COMPILED)
def test_torch_func(target: Target, name: str, how: str, compiled: str | None, asks: bool) -> None:
    """The transform's arguments are arguments of the loss, and may require a gradient, as parameters do."""
    if compiled and target.slow:
        return
    function, leaves = call_of(target, name)
    loss = function(*leaves)
    if how == "jacrev":
        rows = [torch.autograd.grad(one, leaves, retain_graph=True) for one in loss.reshape(-1)]
        expected = [torch.stack(each).view((*loss.shape, *each[0].shape)) for each in zip(*rows, strict=True)]
    else:
        expected = list(torch.autograd.grad(loss.sum(), leaves))
    run = transformed(how, function, tuple(range(len(leaves))))
    run = torch.compile(run, backend=compiled) if compiled else run
    found = [one.detach() for one in run(*(leaf.detach().requires_grad_(asks) for leaf in leaves))]
    torch.testing.assert_close(found, expected, **({} if compiled or how == "jacrev" else {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize(
    ("name", "how"),
    [*product(NAMES, ["penalty", "grad of grad", "graph not retained", "func"]), *product(NAMES[::6], ["compiled"])],
)
def test_second_derivatives_raise(target: Target, name: str, how: str) -> None:
    function, leaves = call_of(target, name)
    run = torch.compile(function, backend="aot_eager") if how == "compiled" else function

    def again() -> None:
        if how == "func":
            numbers = tuple(range(len(leaves)))
            first = torch.func.grad(lambda *some: function(*some).sum(), numbers)
            torch.func.grad(lambda *some: sum(one.square().sum() for one in first(*some)), numbers)(*leaves)
            return
        retain = how != "graph not retained"
        first = torch.autograd.grad(run(*leaves).sum(), leaves[-1:], create_graph=True, retain_graph=retain)
        if how in ("penalty", "compiled"):
            first[0].square().sum().backward()
        else:
            torch.autograd.grad(first[0].sum(), leaves[-1])

    compilers = "|does not currently support double backward|does not require grad"  # the latter: PyTorch 2.11
    with pytest.raises(RuntimeError, match="no second derivatives" + compilers * (how == "compiled")):
        again()


@pytest.mark.parametrize(*crossed(name=NAMES, dtype=[torch.bfloat16, torch.float16]))
def test_autocast_equals_hidden_states_and_classifier_of_its_dtype(
    target: Target, name: str, dtype: torch.dtype
) -> None:
    function, leaves = call_of(target, name)
    with torch.autocast(torch.device(target.device).type, dtype=dtype):
        loss = function(*leaves)
    narrow = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves[:2]] + leaves[2:]
    expected = function(*narrow)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    found, others = (torch.autograd.grad(made.sum(), some) for made, some in ((loss, leaves), (expected, narrow)))
    for one, other in zip(found, others, strict=True):
        assert one.dtype == torch.float32
        # On CUDA the gradient of a bfloat16 classifier is rounded once per chunk. The partial sums may be larger.
        rounded = dtype == torch.bfloat16 and target.device == "cuda"
        atol = 2**-7 * float(other.abs().max()) if rounded else 1e-3
        torch.testing.assert_close(one, other.float(), rtol=0.02, atol=atol)


def test_autocast_leaves_float64_alone(target: Target, tensors: dict[str, Tensor]) -> None:
    if not target.takes("float64"):
        return
    x, w, y = (tensors[name] for name in ("input", "linear_weight", "target"))
    with torch.autocast(target.device.split(":")[0], dtype=torch.bfloat16):
        assert xent.linear_cross_entropy(x.double(), w.double(), y, backend=target.name).dtype == torch.float64
        with pytest.raises(TypeError, match="linear_weight must have the dtype of input"):
            xent.linear_cross_entropy(x, w.double(), y, backend=target.name)
