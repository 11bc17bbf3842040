"""Host work that does not grow with the batch, batched gradients, exported and compiled graphs without CPU tensors."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import xent
from tests.targets import Target


def calls_of(function: Callable[[], Any]) -> int:
    """Count the calls of Python functions and of functions in C."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    function()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


LAYOUTS: dict[str, tuple[Callable[[int], Tensor], int]] = {
    "axis 1": (lambda n: torch.randn(n, 3, 2), 1),
    "all but the last token": (lambda n: torch.randn(n, 3, 2)[:, :-1], -1),
    "all but the first class": (lambda n: torch.randn(n, 3, 4)[..., 1:], -1),
    "transposed": (lambda n: torch.randn(2, 3, n).permute(2, 1, 0), 1),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_of_python_do_not_grow_with_the_batch(layout: str, reduction: str) -> None:
    make, axis = LAYOUTS[layout]
    counts = []
    for number in (20, 20_000):
        logits = make(number).requires_grad_()
        rows = list(logits.shape)
        rows.pop(axis)
        target = torch.zeros(rows, dtype=torch.int64)

        def call(logits: Tensor = logits, target: Tensor = target) -> None:
            loss = xent.cross_entropy(logits, target, axis=axis, reduction=reduction, backend="torch")
            torch.autograd.grad(loss.sum(), logits)

        counts.append(calls_of(call))
    assert counts[1] <= counts[0] + 300, counts


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_inplace_without_rows(target: Target, reduction: str) -> None:
    for empty in (
        torch.zeros(5, device=target.device).expand(0, 5),
        torch.zeros(1, 5, device=target.device).expand(3, 5)[:0],
        torch.zeros(2, 1, 5, device=target.device).expand(2, 4, 5)[:, :0],
    ):
        leaf = empty.detach().requires_grad_()
        classes = torch.zeros(empty.shape[:-1], dtype=torch.int64, device=target.device)
        loss = xent.cross_entropy(leaf, classes, reduction=reduction, inplace=True, backend=target.name)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        assert grad.shape == empty.shape
        assert float(loss.detach().sum()) == 0


def leaves_of(target: Target) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = {"x": torch.randn(6, 8, generator=generator), "w": torch.randn(11, 8, generator=generator)}
    return {name: tensor.to(target.device).requires_grad_() for name, tensor in drawn.items()}


def functions_of(target: Target) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    classes = torch.tensor([0, 3, -100, 10, 7, 7], device=target.device)
    teacher = torch.randn(6, 11, generator=torch.Generator().manual_seed(1)).to(target.device)
    top = teacher.log_softmax(-1).topk(4)
    known = xent.TopKTeacher(top.indices, top.values)
    ids = torch.arange(11, device=target.device).repeat(6)
    support = xent.Support(ids, torch.arange(0, 67, 11, device=target.device))
    given: dict[str, Any] = {"backend": target.name}
    none = given | {"reduction": "none"}
    return {
        "cross_entropy": lambda x, w: xent.cross_entropy(x @ w.t(), classes, **none),
        "cross_entropy, mean": lambda x, w: xent.cross_entropy(x @ w.t(), classes, **given)[None],
        "linear_cross_entropy": lambda x, w: xent.linear_cross_entropy(x, w, classes, workspace=99, **none),
        "linear_cross_entropy, mean": lambda x, w: xent.linear_cross_entropy(x, w, classes, **given)[None],
        "log_probs": lambda x, w: xent.log_probs(x @ w.t(), classes, **given),
        "linear_log_probs": lambda x, w: xent.linear_log_probs(x, w, classes, **given),
        "linear_log_probs, entropy": lambda x, w: xent.linear_log_probs(x, w, classes, entropy=True, **given)[1],
        "log_probs, support": lambda x, w: xent.log_probs(x @ w.t(), classes, support=support, **given),
        "divergence": lambda x, w: xent.divergence(x @ w.t(), teacher, beta=0.3, **none),
        "linear_divergence": lambda x, w: xent.linear_divergence(x, w, teacher, **none),
        "linear_divergence, mean": lambda x, w: xent.linear_divergence(x, w, teacher, beta=1.0, **given)[None],
        "linear_divergence, top k": lambda x, w: xent.linear_divergence(x, w, known, **none),
    }


@pytest.mark.parametrize("name", functions_of(Target("torch", "cpu")))
def test_batched_gradients(target: Target, name: str) -> None:
    function, leaves = functions_of(target)[name], list(leaves_of(target).values())
    loss = function(*leaves)
    upstreams = torch.randn(3, *loss.shape, generator=torch.Generator().manual_seed(2)).to(loss)
    each = [torch.autograd.grad(loss, leaves, one, retain_graph=True) for one in upstreams]
    found = torch.autograd.grad(loss, leaves, upstreams, is_grads_batched=True)
    for number, grad in enumerate(found):
        torch.testing.assert_close(grad, torch.stack([one[number] for one in each]))


def test_bfloat16_gradient_of_a_classifier_in_64_chunks() -> None:
    torch.manual_seed(0)
    rows, width, vocabulary = 512, 64, 1000
    x, w = torch.randn(rows, width).bfloat16(), (torch.randn(vocabulary, width) / 8).bfloat16().requires_grad_()
    target = torch.randint(vocabulary, (rows,))
    wide = w.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(F.cross_entropy(x.double() @ wide.t(), target), wide)
    (plain,) = torch.autograd.grad(F.cross_entropy(F.linear(x, w).float(), target), w)
    chunked = xent.linear_cross_entropy(x, w, target, workspace=rows // 64 * vocabulary * 2, backend="torch")
    (found,) = torch.autograd.grad(chunked, w)
    assert (found.double() - truth).norm() <= 1.5 * (plain.double() - truth).norm()


class Exported(torch.nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *tensors: Tensor) -> Any:
        return self.run(*tensors)


def exports_of(target: Target) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return functions of hidden states, classifier, and a teacher's logits or probabilities."""
    given: dict[str, Any] = {"backend": target.name}
    return {
        "divergence": lambda x, w, t: xent.divergence(x @ w.t(), t, **given),
        "divergence, none": lambda x, w, t: xent.divergence(x @ w.t(), t, beta=0.5, reduction="none", **given).sum(),
        "linear_divergence": lambda x, w, t: xent.linear_divergence(x, w, t, **given),
        "linear_divergence, none": lambda x, w, t: xent.linear_divergence(x, w, t, reduction="none", **given).sum(),
        "probabilities": lambda x, w, q: xent.cross_entropy(x @ w.t(), q, **given),
        "linear, probabilities": lambda x, w, q: xent.linear_cross_entropy(x, w, q, reduction="none", **given).sum(),
    }


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="PyTorch 2.6 does not say that it exports")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("name", exports_of(Target("torch", "cpu")))
def test_exported_programs_give_gradients(target: Target, name: str, asks: bool, strict: bool) -> None:
    """Also if the example inputs did not require any, and to class probabilities that require one."""
    torch._dynamo.reset()
    function, leaves = exports_of(target)[name], list(leaves_of(target).values())
    third = torch.randn(6, 11, generator=torch.Generator().manual_seed(1)).to(target.device)
    trained = "probabilities" in name
    third = third.softmax(-1).requires_grad_(trained) if trained else third
    example = [leaf.detach().clone().requires_grad_(asks) for leaf in leaves]
    example.append(third.detach().clone().requires_grad_(asks and trained))
    program = torch.export.export(Exported(function), tuple(example), strict=strict).module()
    asked = [*leaves, third] if trained else leaves
    results = []
    for run in (function, program):
        loss = run(*leaves, third)
        results.append((loss.detach(), *torch.autograd.grad(loss, asked)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "numbers": {"z_loss": 0.1, "label_smoothing": 0.1, "softcap": 5.0, "logit_scale": 0.7},
    "normalizer": {"normalizer": 7.0},
    "none": {"reduction": "none", "z_loss": 0.1},
}


def constants_of(graph: torch.fx.GraphModule) -> list[str]:
    """Return the nodes of a graph that make or hold a tensor without any tensor as input."""
    found = []
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        is_made = node.op == "get_attr" or (node.op == "call_function" and not node.all_input_nodes)
        if is_made and isinstance(value, Tensor) and value.dim() <= 1 and value.device.type == "cpu":
            made_by_loss = value.dtype == torch.float64 or node.op == "get_attr" or "lift" in str(node.target)
            found += [node.format_node() or node.name] if made_by_loss else []
    return found


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
def test_graphs_have_no_tensors_of_options(target: Target, function: str, options: str) -> None:
    """A CPU tensor in a graph prevents CUDA graphs."""
    torch._dynamo.reset()
    found: list[str] = []
    inputs: list[int] = []

    def note(graph: torch.fx.GraphModule, example: Any) -> Any:
        found.extend(constants_of(graph))
        inputs.append(sum(isinstance(one, Tensor) and one.dim() == 0 and one.dtype == torch.float64 for one in example))
        return make_boxed_func(graph.forward)

    leaves = leaves_of(target)
    classes = torch.tensor([0, 3, -100, 10, 7, 7], device=target.device)
    given = OPTIONS[options] | {"backend": target.name}

    def loss(x: Tensor, w: Tensor) -> Tensor:
        if function == "cross_entropy":
            made: Tensor = xent.cross_entropy(x @ w.t(), classes, **given)
        else:
            made = xent.linear_cross_entropy(x, w, classes, **given)
        return made.sum()

    compiled = torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=note, bw_compiler=note))
    made, expected = compiled(*leaves.values()), loss(*leaves.values())
    torch.testing.assert_close(made, expected)
    asked = list(leaves.values())
    for one, other in zip(torch.autograd.grad(made, asked), torch.autograd.grad(expected, asked), strict=True):
        torch.testing.assert_close(one, other)
    assert len(inputs) == 2
    assert found == []
    assert sum(inputs) == 0


CHANGING: dict[str, tuple[float, ...]] = {
    "normalizer": (3.0, 5.0, 7.5, 100.0),
    "z_loss": (0.1, 0.2, 0.0, 1.0),
    "label_smoothing": (0.1, 0.0, 1.0, 0.3),
    "softcap": (3.0, 5.0, 30.0, 1.0),
    "logit_scale": (0.5, 1.0, -0.7, 2.0),
}


@pytest.mark.parametrize("option", CHANGING)
@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize("compiles", [False, True])
def test_options_that_are_tensors_never_recompile(target: Target, function: str, option: str, compiles: bool) -> None:
    """The results are those of the same numbers."""
    torch._dynamo.reset()
    counters.clear()
    classes = torch.tensor([0, 3, -100, 10, 7, 7], device=target.device)

    def loss(x: Tensor, w: Tensor, value: Any) -> Tensor:
        options = {option: value, "backend": target.name}
        if function == "cross_entropy":
            made: Tensor = xent.cross_entropy(x @ w.t(), classes, **options)
        else:
            made = xent.linear_cross_entropy(x, w, classes, **options)
        return made

    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiles else loss
    leaves = list(leaves_of(target).values())
    for value in CHANGING[option]:
        expected, found = loss(*leaves, value), run(*leaves, torch.tensor(value, device=target.device))
        torch.testing.assert_close(found, expected)
        pairs = zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other)
    if compiles:
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("option", ["z_loss", "label_smoothing"])
def test_values_of_tensors_are_checked_where_they_can_be(option: str) -> None:
    z, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"{option} must be"):
        xent.cross_entropy(z, y, **{option: torch.tensor(-1.0)})
    with pytest.raises(ValueError, match=f"{option} requires a gradient, which xent does not compute"):
        xent.cross_entropy(z, y, **{option: torch.tensor(0.1, requires_grad=True)})
