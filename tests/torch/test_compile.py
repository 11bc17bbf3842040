"""torch.compile(fullgraph=True), torch.export, fake and meta tensors: the operations behave like PyTorch's own."""

from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import xent
from tests.cases import FUNCTIONS
from tests.covering import crossed
from tests.targets import Target
from xent.core.spec import STAT_NAMES

NUMBERS = {"label_smoothing": 0.1, "z_loss": 0.3, "softcap": 5.0, "logit_scale": -0.7, "normalizer": 3.5}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def drawn(target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, a classifier and classes, one of which is ignored."""
    torch.manual_seed(0)
    x, w = torch.randn(6, 8, device=target.device), torch.randn(11, 8, device=target.device)
    y = torch.randint(11, (6,), device=target.device)
    y[1] = -100
    return x.requires_grad_(), w.requires_grad_(), y


def gradients(results: list[Tensor], leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the gradients of the results that require one, each with an upstream gradient of its own."""
    asked = [(one, number) for number, one in enumerate(results) if one.requires_grad]
    upstream = [torch.linspace(number + 1, number + 2, one.numel()).view(one.shape).to(one) for one, number in asked]
    return torch.autograd.grad([one for one, _ in asked], leaves, upstream)


def of_both(target: Target, x: Tensor, w: Tensor, y: Tensor, **options: Any) -> list[Tensor]:
    """Return the losses of both functions with reductions "mean" and "none"."""
    logits, mean = (x @ w.t()) * 2, {"backend": target.name} | options
    none = {name: value for name, value in mean.items() if name != "normalizer"} | {"reduction": "none"}
    sources = ((xent.cross_entropy, (logits,)), (xent.linear_cross_entropy, (x * 2, w)))
    return [function(*given, y, **kinds) for function, given in sources for kinds in (mean, none)]


def of_every_kind(target: Target, x: Tensor, w: Tensor, y: Tensor, z: float) -> list[Tensor]:
    """Return losses in place, in chunks, with all statistics, and of several heads."""
    found = []
    for reduction in ("mean", "none"):
        options = {"z_loss": z, "label_smoothing": z / 2, "reduction": reduction, "backend": target.name}
        found.append(xent.cross_entropy((x @ w.t()) * 2, y, inplace=True, **options))
        loss, stats = xent.linear_cross_entropy(x, w, y, softcap=10 * z, workspace=200, stats=STAT_NAMES, **options)
        found += [loss, *(getattr(stats, name) for name in STAT_NAMES)]
    heads = torch.stack([x, 2 * x, -x])[:, :, None].expand(-1, -1, 5, -1)
    several = {"shift": (1, 2, 9), "head_weight": (1.0, z, -z), "backend": target.name}
    return [*found, xent.linear_cross_entropy(heads, w, y[:, None].expand(-1, 5), **several)]


def test_compiles_whole_for_any_number_and_any_number_of_rows(target: Target) -> None:
    """A new number of rows compiles once more, whatever the number of rows."""
    x, w, y = drawn(target)
    compiled = torch.compile(of_every_kind, fullgraph=True, backend="aot_eager")
    for rows, z in ((6, 0.15), (5, 0.27), (4, 0.27), (3, 0.27)):
        leaves = x[:rows].detach().requires_grad_(), w
        found, expected = (run(target, *leaves, y[:rows], z) for run in (compiled, of_every_kind))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(gradients(results, leaves) for results in (found, expected)))
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("mode", ["plain tensors", "no_grad", "inference_mode"])
def test_compiles_without_gradients(target: Target, mode: str) -> None:
    x, w, y = drawn(target)
    if mode == "plain tensors":
        x, w = x.detach(), w.detach()
    compiled = torch.compile(of_both, fullgraph=True, backend="aot_eager")
    context = {"plain tensors": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with context[mode]():
        for rows in (6, 5, 4) if mode == "no_grad" else (6,):
            torch.testing.assert_close(*(run(target, x[:rows], w, y[:rows]) for run in (compiled, of_both)))
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiles_with_inductor(target: Target) -> None:
    x, w, y = drawn(target)

    def means(x: Tensor, w: Tensor) -> list[Tensor]:
        return of_both(target, x, w, y)[::2]

    found, expected = (run(x, w) for run in (torch.compile(means, fullgraph=True), means))
    torch.testing.assert_close(*(gradients(results, (x, w)) for results in (found, expected)))


@pytest.mark.parametrize(
    ("kind", "constant"),
    [(np.float64, False), (np.float32, True), (np.array, False), (float, False), (float, True), (torch.tensor, True)],
)
def test_compiles_with_numbers_of_any_kind(target: Target, kind: Any, constant: bool) -> None:
    """As arguments or constants of the graph. Python's numbers are not rounded to float32."""
    x, _, y = drawn(target)
    is_exact = kind is float and target.takes("float64")
    x = x.detach().double() if is_exact else x
    numbers = {name: kind(value) for name, value in NUMBERS.items()}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: Tensor, given: Any) -> Any:
        return xent.cross_entropy(x, y % 8, backend=target.name, **(numbers if constant else given))

    expected = xent.cross_entropy(x, y % 8, backend=target.name, **NUMBERS)
    close = 1e-12 if is_exact else 2e-6
    torch.testing.assert_close(compiled(x, numbers), expected, rtol=close, atol=0)


@pytest.mark.parametrize("compiles", [False, True])
def test_options_that_are_tensors_never_recompile(target: Target, compiles: bool) -> None:
    """The results are those of the same numbers."""
    x, w, y = drawn(target)

    def call(x: Tensor, w: Tensor, options: dict[str, Any]) -> list[Tensor]:
        return of_both(target, x, w, y, **options)

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiles else call
    for values in ((0.1, 0.1, 3.0, 0.5, 3.0), (0.0, 0.2, 5.0, 1.0, 5.0), (1.0, 0.0, 30.0, -0.7, 7.5)):
        numbers = dict(zip(NUMBERS, values, strict=True))
        expected = call(x, w, numbers)
        found = run(x, w, {name: torch.tensor(value, device=target.device) for name, value in numbers.items()})
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(gradients(results, (x, w)) for results in (found, expected)))
    if compiles:
        assert counters["stats"]["unique_graphs"] == 1


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


def test_graphs_have_no_tensors_of_options(target: Target) -> None:
    """A CPU tensor in a graph prevents CUDA graphs."""
    constants, inputs = [], []

    def note(graph: torch.fx.GraphModule, example: Any) -> Any:
        constants.extend(constants_of(graph))
        inputs.append(sum(isinstance(one, Tensor) and one.dim() == 0 and one.dtype == torch.float64 for one in example))
        return make_boxed_func(graph.forward)

    x, w, y = drawn(target)

    def call(x: Tensor, w: Tensor) -> list[Tensor]:
        return of_both(target, x, w, y, **NUMBERS)

    compiled = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=note, bw_compiler=note))
    found, expected = compiled(x, w), call(x, w)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(gradients(results, (x, w)) for results in (found, expected)))
    assert inputs == [0, 0]
    assert constants == []


class Exported(torch.nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, *tensors: Tensor) -> Any:
        return self.run(*tensors)


def test_exports_for_any_number_of_rows(target: Target) -> None:
    def loss(logits: Tensor, classes: Tensor) -> Tensor:
        return xent.cross_entropy(logits, classes, backend=target.name)

    _, w, y = drawn(target)
    logits, rows = w.detach()[:6], torch.export.Dim("rows")
    exported = torch.export.export(Exported(loss), (logits, y % 8), dynamic_shapes=(({0: rows}, {0: rows}),)).module()
    torch.testing.assert_close(exported(logits[:3], y[:3] % 8), loss(logits[:3], y[:3] % 8))


def compare_programs(
    run: Any, leaves: list[Tensor], rest: tuple[Tensor, ...], asks: bool, strict: bool, frozen: tuple[Any, ...] = ((),)
) -> Any:
    """Compare a function and its exported program: results and gradients of leaves that are not `frozen`."""
    example = [leaf.detach().clone().requires_grad_(asks) for leaf in leaves]
    with torch.no_grad() if not asks and strict else torch.enable_grad():
        program = torch.export.export(Exported(run), (*example, *rest), strict=strict).module()
    for numbers in frozen:
        given = [leaf.detach().clone().requires_grad_(number not in numbers) for number, leaf in enumerate(leaves)]
        asked = tuple(leaf for leaf in given if leaf.requires_grad)
        results = [one(*given, *rest) for one in (run, program)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(gradients(some, asked) for some in results))
    return program


@pytest.mark.parametrize(*crossed(strict=[False, True], asks=[False, True]))
def test_exported_programs_give_gradients(target: Target, asks: bool, strict: bool) -> None:
    """An exported program gives gradients to all inputs that require one at run time, whatever the example did."""
    x, w, y = drawn(target)
    scale, weights = torch.tensor(0.7, device=target.device), torch.linspace(0.5, 2, 6, device=target.device)
    teacher = torch.linspace(-1, 2, 66, device=target.device).view(6, 11)

    def run(x: Tensor, w: Tensor, scale: Tensor, q: Tensor, weights: Tensor, y: Tensor, teacher: Tensor) -> Any:
        found, sources = [], {"cross_entropy": ((x @ w.t()) * 2,), "linear_cross_entropy": (x * 2, w)}
        for function in FUNCTIONS:
            call, divergence = getattr(xent, function), getattr(xent, function.replace("cross_entropy", "divergence"))
            for reduction in ("mean", "none"):
                given = {"reduction": reduction, "backend": target.name}
                more = given | {"stats": ("lse", "count"), "logit_scale": scale, "sample_weight": weights}
                loss, stats = call(*sources[function], y, **more)
                found += [loss, stats.lse, stats.count, call(*sources[function], q, **given)]
                found.append(divergence(*sources[function], teacher, beta=0.5, **given))
        return found

    leaves, rest = [x, w, scale, teacher.softmax(-1)], (weights, y, teacher)
    program = compare_programs(run, leaves, rest, asks, strict, ((), (2,), (0, 1), (0, 2)))
    with torch.no_grad():
        torch.testing.assert_close(program(*leaves, *rest), run(*leaves, *rest))
    with pytest.raises(ValueError, match="sample_weight requires a gradient, which xent does not compute"):
        program(*leaves, weights.clone().requires_grad_(), y, teacher)
    (gradient,) = torch.autograd.grad(program(*leaves, *rest)[0], x, create_graph=True)
    with pytest.raises(RuntimeError, match="xent computes no second derivatives"):
        torch.autograd.grad(gradient.sum(), x)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_fake_tensors_have_shapes_and_dtypes(target: Target, reduction: str, dtype: torch.dtype, kind: str) -> None:
    if not target.takes(str(dtype).removeprefix("torch.")):
        return

    def run(device: str) -> list[Tensor]:
        x = torch.zeros(2, 3, 8, dtype=dtype, device=device, requires_grad=True)
        w = torch.zeros(11, 8, dtype=dtype, device=device, requires_grad=True)
        b = torch.zeros(11, dtype=dtype, device=device, requires_grad=True)
        y = torch.zeros(2, 3, dtype=torch.int64, device=device)
        options = {"reduction": reduction, "stats": STAT_NAMES, "backend": target.name}
        linear, linear_stats = xent.linear_cross_entropy(x, w, y, linear_bias=b, **options)
        plain, plain_stats = xent.cross_entropy(x, y, **options)
        kinds = {"reduction": reduction, "backend": target.name}
        apart = [
            xent.divergence(x, torch.zeros_like(x), **kinds),
            xent.linear_divergence(x, w, xent.LinearTeacher(x.detach(), w.detach()), linear_bias=b, **kinds),
            *xent.linear_log_probs(x, w, y, entropy=True, backend=target.name),
        ]
        sum(one.sum() for one in (linear, plain, *apart)).backward()
        stats = [getattr(stats, name) for stats in (linear_stats, plain_stats) for name in STAT_NAMES]
        return [linear, plain, *apart, *stats, *(tensor.grad for tensor in (x, w, b) if tensor.grad is not None)]

    real = run(target.device)
    if kind == "meta":
        made = run("meta")
    else:
        with FakeTensorMode():
            made = run(target.device)
    assert len(made) == len(real)
    for one, other in zip(made, real, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


class Recorder(TorchDispatchMode):
    """Records every call of xent's operations, with the values before it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "xent":
            self.calls.append((func, tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(*crossed(dtype=[torch.float32, torch.bfloat16, torch.float16], reduction=["mean", "none"]))
def test_operations_match_their_schemas_and_fakes(target: Target, reduction: str, dtype: torch.dtype) -> None:
    options = {"reduction": reduction, "stats": STAT_NAMES, "backend": target.name}
    x, w, y = (tensor.detach().to(dtype) if tensor.is_floating_point() else tensor for tensor in drawn(target))
    b = torch.zeros(11, dtype=dtype, device=target.device)
    with Recorder() as recorder:
        for asking in ((), (x,), (w,), (b,), (x, w, b)):
            for tensor in (x, w, b):
                tensor.requires_grad_(any(tensor is one for one in asking))
            loss, _ = xent.linear_cross_entropy(x, w, y, linear_bias=b, workspace=100, **options)
            if asking:
                loss.sum().backward()
        for inplace in (False, True):
            for strided in (x.t().contiguous().t(), (x * 1)[:, :7]):
                loss, _ = xent.cross_entropy(strided, y % 7, inplace=inplace, **options)
                loss.sum().backward()
        xent.cross_entropy(x.detach(), y % 8, **options)
    assert recorder.calls
    for operation, args in recorder.calls:
        torch.library.opcheck(operation, args, test_utils=("test_schema", "test_faketensor"))


def test_default_dtype_and_device_do_not_matter(target: Target) -> None:
    x, w, y = drawn(target)
    expected = of_both(target, x, w, y)
    with torch.device("meta"):
        torch.testing.assert_close(of_both(target, x, w, y), expected, rtol=0, atol=0)
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(of_both(target, x, w, y), expected, rtol=0, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)


def total(target: Target, x: Tensor) -> Tensor:
    """Return a sum of losses with both reductions."""
    y, options = torch.arange(6, device=target.device), {"backend": target.name}
    mean = xent.cross_entropy(x * 2, y, **options)
    return 3 * mean + xent.cross_entropy(x * 2, y, reduction="none", **options).sum()


@pytest.mark.parametrize("how", ["checkpoint in a region", "region in a checkpoint", "grad in a region"])
def test_compiles_with_checkpoints_and_gradients_inside(target: Target, how: str) -> None:
    x, _, _ = drawn(target)

    def loss(x: Tensor) -> Tensor:
        return total(target, x)

    def checkpointed(function: Any, x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=False)

    (expected,) = torch.autograd.grad(loss(x), x)
    if how == "grad in a region":
        (found,) = torch.compile(lambda x: torch.autograd.grad(loss(x), x), backend="aot_eager")(x)
    elif how == "region in a checkpoint":
        (found,) = torch.autograd.grad(checkpointed(torch.compile(loss, backend="aot_eager"), x), x)
    else:
        compiled = torch.compile(lambda x: checkpointed(loss, x), backend="aot_eager")
        (found,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # a warning of PyTorch during tracing
def test_compiled_autograd(target: Target) -> None:
    """Of an eager and of a compiled forward pass."""
    x, _, _ = drawn(target)
    (expected,) = torch.autograd.grad(total(target, x), x)
    compiled = torch.compile(total, backend="aot_eager")
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        (total(target, x) + 2 * compiled(target, x)).backward()
    torch.testing.assert_close(x.grad, 3 * expected)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_by_make_fx(target: Target, mode: str) -> None:
    x = drawn(target)[0].detach()
    gradient = torch.func.grad(lambda x: total(target, x))
    traced = make_fx(gradient, tracing_mode=mode)(x)
    torch.testing.assert_close(traced(x + 1), gradient(x + 1))


INTEGERS: dict[str, tuple[int, ...]] = {
    "ignore_index": (-100, 3, 5, 0),
    "axis": (1, -1, 0),
    "softcap": (30, 40, 50),
    "label_smoothing": (0, 1, 0),
    "shift": (0, 1, 2),
    "workspace": (100, 900, 300),
    "shift of heads": (0, 1, 2),
    "temperature": (1, 2, 3),
    "beta": (0, 1, 0),
}


@pytest.mark.parametrize("option", INTEGERS)
def test_compiles_with_an_integer_that_changes(target: Target, option: str) -> None:
    """Dynamo makes an integer symbolic that has changed, and so does torch.export if its dimension is dynamic."""
    x, w, y = drawn(target)
    square, heads = x @ x.T, torch.stack([x, -x])

    def results(x: Tensor, w: Tensor, square: Tensor, heads: Tensor, value: int) -> Tensor:
        named: dict[str, Any] = {option: value, "backend": target.name}
        if option == "axis":
            return xent.cross_entropy(square, y % 6, **named)
        if option == "shift of heads":
            named = {"shift": (value, value + 1), "head_weight": (value + 1, 2), "backend": target.name}
            return xent.linear_cross_entropy(heads, w, y, **named)
        if option in ("shift", "workspace"):
            return xent.linear_cross_entropy(x, w, y, **named)
        if option == "temperature":
            return xent.linear_log_probs(x, w, y, **named).sum()
        return xent.divergence(x, -x.detach(), **named) if option == "beta" else xent.cross_entropy(x, y % 8, **named)

    leaves = [leaf.detach().requires_grad_() for leaf in (x, w, square, heads)]
    compiled = torch.compile(results, fullgraph=True, backend="aot_eager")
    for value in INTEGERS[option]:
        found, expected = (function(*leaves, value) for function in (compiled, results))
        torch.testing.assert_close(found, expected)
        gradients = (torch.autograd.grad(one, leaves, allow_unused=True) for one in (found, expected))
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_an_integer_that_is_a_size(target: Target, strict: bool) -> None:
    """It becomes a constant of the program, as everything that is no tensor."""

    class Loss(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            sizes: dict[str, Any] = {
                "ignore_index": w.shape[0] - 1,
                "workspace": 100 * x.shape[0],
                "shift": x.shape[0] - 4,
            }
            return xent.linear_cross_entropy(x, w, y, backend=target.name, **sizes)

    leaves, free = tuple(one.detach() for one in drawn(target)), {0: torch.export.Dim.AUTO}
    program = torch.export.export(Loss(), leaves, dynamic_shapes=(free, free, free), strict=strict).module()
    torch.testing.assert_close(program(*leaves), Loss()(*leaves))
