"""torch.compile(fullgraph=True), fake and meta tensors, autocast: the operations behave like PyTorch's own."""

import subprocess
import sys
from collections.abc import Callable
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


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def losses(target: Target, **options: Any) -> dict[str, Any]:
    options = {"backend": target.name} | options

    def logits_loss(x: Tensor, w: Tensor, y: Tensor, z: float) -> Tensor:
        return xent.cross_entropy((x @ w.t()) * 2, y, z_loss=z, label_smoothing=z / 2, **options).sum()

    def linear_loss(x: Tensor, w: Tensor, y: Tensor, z: float) -> Tensor:
        return xent.linear_cross_entropy(x * 2, w, y, z_loss=z, softcap=10 * z, **options).sum()

    return {"cross_entropy": logits_loss, "linear_cross_entropy": linear_loss}


@pytest.fixture(scope="module")
def quotes() -> bool:
    """Whether Dynamo quotes an exception that it meets in a whole graph. Without whole graphs it is raised itself."""

    def fails(x: Tensor, words: str) -> Tensor:
        raise ValueError(words)

    with pytest.raises(Exception) as error:  # noqa: PT011 (Dynamo's own exception)
        torch.compile(fails, fullgraph=True, backend="eager")(torch.ones(()), "what is wrong")
    return "what is wrong" in str(error.value)


def drawn(target: Target) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(6, 8, device=target.device), torch.randn(11, 8, device=target.device)
    return x.requires_grad_(), w.requires_grad_(), torch.randint(11, (6,), device=target.device)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none"}, {"inplace": True}, {"inplace": True, "reduction": "none"}], ids=str
)
def test_compiles_whole_for_any_number(target: Target, function: str, options: dict[str, Any]) -> None:
    if "inplace" in options and function == "linear_cross_entropy":
        options = {key: value for key, value in options.items() if key != "inplace"} | {"workspace": 200}
    loss = losses(target, **options)[function]
    x, w, y = drawn(target)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for z in (0.1, 0.2, 0.7):
        found, expected = compiled(x, w, y, z), loss(x, w, y, z)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, (x, w)), torch.autograd.grad(expected, (x, w)))


@pytest.mark.parametrize(*crossed(function=FUNCTIONS, reduction=["mean", "none"], asks=[False, True]))
def test_recompiles_for_the_number_of_rows_once_at_most(
    target: Target, function: str, reduction: str, asks: bool
) -> None:
    loss = losses(target, reduction=reduction)[function]
    x, w, y = drawn(target)
    x, w = x.detach(), w.detach().requires_grad_(asks)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for rows in (6, 5, 4, 3, 2):
        found, expected = compiled(x[:rows], w, y[:rows], 0.1), loss(x[:rows], w, y[:rows], 0.1)
        torch.testing.assert_close(found, expected)
        if asks:
            torch.testing.assert_close(torch.autograd.grad(found, w), torch.autograd.grad(expected, w))
    assert counters["stats"]["unique_graphs"] <= 2


def test_heads_recompile_for_weights_and_for_sizes_once_at_most(target: Target) -> None:
    def loss(x: Tensor, w: Tensor, y: Tensor, head_weight: tuple[float, ...]) -> Tensor:
        return xent.linear_cross_entropy(x, w, y, shift=(1, 2, 9), head_weight=head_weight, backend=target.name)

    (_, w, _), compiled = drawn(target), torch.compile(loss, fullgraph=True, backend="aot_eager")
    for batch in (2, 3, 4):
        x = torch.randn(3, batch, 5, 8, device=target.device, requires_grad=True)
        y = torch.randint(11, (batch, 5), device=target.device)
        for weights in ((1.0, 0.5, 0.25), (1.0, 0.4, 0.2), (1.0, 0.3, 0.1)):
            found, expected = (run(x, w, y, weights) for run in (compiled, loss))
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(*(torch.autograd.grad(made, (x, w)) for made in (found, expected)))
    assert counters["stats"]["unique_graphs"] <= 3


def test_exports_for_any_number_of_rows(target: Target) -> None:
    class Loss(torch.nn.Module):
        def forward(self, logits: Tensor, classes: Tensor) -> Tensor:
            return xent.cross_entropy(logits, classes, backend=target.name)

    _, w, y = drawn(target)
    logits, rows = w.detach()[:6], torch.export.Dim("rows")
    exported = torch.export.export(Loss(), (logits, y % 8), dynamic_shapes=({0: rows}, {0: rows})).module()
    torch.testing.assert_close(exported(logits[:3], y[:3] % 8), xent.cross_entropy(logits[:3], y[:3] % 8))


class Exported(torch.nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, *tensors: Tensor) -> Any:
        return self.run(*tensors)


def compare_programs(
    run: Any, leaves: list[Tensor], rest: tuple[Tensor, ...], asks: bool, strict: bool, frozen: tuple[Any, ...] = ((),)
) -> Any:
    """Compare a function and its exported program: results and gradients of leaves that are not `frozen`."""
    torch._dynamo.reset()
    example = [leaf.detach().clone().requires_grad_(asks) for leaf in leaves]
    with torch.no_grad() if not asks and strict else torch.enable_grad():
        program = torch.export.export(Exported(run), (*example, *rest), strict=strict).module()
    for numbers in frozen:
        given = [leaf.detach().clone().requires_grad_(number not in numbers) for number, leaf in enumerate(leaves)]
        asked = [leaf for leaf in given if leaf.requires_grad]
        results = []
        for one in (run, program):
            total, *others = one(*given, *rest)
            results.append((total, *others, *torch.autograd.grad(total, asked)))
        torch.testing.assert_close(*results)
    return program


@pytest.mark.parametrize(
    *crossed(
        function=FUNCTIONS,
        reduction=["mean", "none"],
        asks=[False, True],
        strict=[False, True],
    )
)
def test_exported_programs_give_gradients(
    target: Target, function: str, reduction: str, asks: bool, strict: bool
) -> None:
    """An exported program gives gradients to all inputs that require one at run time, whatever the example did."""
    x, w, y = drawn(target)
    scale, weights = torch.tensor(0.7, device=target.device), torch.linspace(0.5, 2, 6, device=target.device)
    options = {"stats": ("lse", "count"), "reduction": reduction, "backend": target.name}

    def run(x: Tensor, w: Tensor, scale: Tensor, weights: Tensor, y: Tensor) -> Any:
        sources = ((x @ w.t()) * 2,) if function == "cross_entropy" else (x * 2, w)
        loss, stats = getattr(xent, function)(*sources, y, logit_scale=scale, sample_weight=weights, **options)
        total = loss.sum() + (stats.lse.square().sum() if reduction == "none" else 0)
        return total, loss, stats.lse, stats.count

    program = compare_programs(run, [x, w, scale], (weights, y), asks, strict, ((), (2,), (0, 1), (0, 2)))
    with torch.no_grad():
        torch.testing.assert_close(program(x, w, scale, weights, y)[0], run(x, w, scale, weights, y)[0])
    with pytest.raises(ValueError, match="sample_weight requires a gradient, which xent does not compute"):
        program(x, w, scale, weights.clone().requires_grad_(), y)
    (gradient,) = torch.autograd.grad(program(x, w, scale, weights, y)[0], x, create_graph=True)
    with pytest.raises(RuntimeError, match="xent computes no second derivatives"):
        torch.autograd.grad(gradient.sum(), x)


def exports_of(target: Target) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return functions of hidden states, classifier, and a teacher's logits or probabilities."""
    given = {"backend": target.name}
    return {
        "divergence": lambda x, w, t: xent.divergence(x @ w.t(), t, **given),
        "divergence, none": lambda x, w, t: xent.divergence(x @ w.t(), t, beta=0.5, reduction="none", **given).sum(),
        "linear_divergence": lambda x, w, t: xent.linear_divergence(x, w, t, **given),
        "linear_divergence, none": lambda x, w, t: xent.linear_divergence(x, w, t, reduction="none", **given).sum(),
        "probabilities": lambda x, w, q: xent.cross_entropy(x @ w.t(), q, **given),
        "linear, probabilities": lambda x, w, q: xent.linear_cross_entropy(x, w, q, reduction="none", **given).sum(),
    }


@pytest.mark.parametrize(*crossed(strict=[False, True], asks=[False, True], name=exports_of(Target("torch", "cpu"))))
def test_exported_divergences_and_class_probabilities(target: Target, name: str, asks: bool, strict: bool) -> None:
    function, (x, w, _) = exports_of(target)[name], drawn(target)
    third = torch.randn(6, 11, generator=torch.Generator().manual_seed(1)).to(target.device)
    leaves, rest = ([x, w, third.softmax(-1)], ()) if "probabilities" in name else ([x, w], (third,))
    compare_programs(lambda *given: (function(*given),), leaves, rest, asks, strict)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiles_with_inductor(target: Target, function: str) -> None:
    loss = losses(target)[function]
    x, w, y = drawn(target)
    found = torch.compile(loss, fullgraph=True)(x, w, y, 0.1)
    torch.testing.assert_close(torch.autograd.grad(found, (x, w)), torch.autograd.grad(loss(x, w, y, 0.1), (x, w)))


def test_compiles_with_statistics_dynamic_rows_and_ignored_targets(target: Target) -> None:
    x, w, y = drawn(target)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def compiled(x: Tensor, w: Tensor, y: Tensor) -> Any:
        return xent.linear_cross_entropy(x, w, y, stats=STAT_NAMES, shift=1)

    for rows in (6, 5, 3):
        classes = y[:rows].clone()
        classes[1] = -100
        hidden = x.detach()[:rows]
        found = compiled(hidden, w, classes)
        expected = xent.linear_cross_entropy(hidden, w, classes, stats=STAT_NAMES, shift=1)
        torch.testing.assert_close(found[0], expected[0])
        for name in STAT_NAMES:
            torch.testing.assert_close(getattr(found[1], name), getattr(expected[1], name))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("label_smoothing", -0.05, r"label_smoothing must be in \[0, 1\], got -0.05"),
        ("softcap", float("nan"), "softcap must be finite and > 0, or None, got nan"),
        ("normalizer", float("nan"), "normalizer must be finite and >= 0, got nan"),
    ],
)
def test_bad_number_is_an_error_in_a_compiled_graph_too(
    target: Target, option: str, value: float, message: str, quotes: bool
) -> None:
    x, _, y = drawn(target)

    def loss(x: Tensor, value: float) -> Any:
        return xent.cross_entropy(x, y % 8, backend=target.name, **{option: value})

    with pytest.raises(Exception, match=message):
        torch.compile(loss, fullgraph=quotes, backend="aot_eager")(x, value)


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


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_multiplies_as_linear_does_and_keeps_the_weight_gradient_wide(
    target: Target, reduction: str, dtype: torch.dtype
) -> None:
    x, w, y = drawn(target)
    b = torch.randn(11, device=target.device, requires_grad=True)
    kind = target.device.split(":")[0]
    with torch.autocast(kind, dtype=dtype):
        loss = xent.linear_cross_entropy(x, w, y, linear_bias=b, reduction=reduction, backend=target.name).sum()
        logits = torch.nn.functional.linear(x, w, b)
    assert logits.dtype == dtype
    plain = torch.nn.functional.cross_entropy(logits.float(), y, reduction=reduction).sum()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain, rtol=1e-3, atol=0)
    found, expected = torch.autograd.grad(loss, (x, w, b)), torch.autograd.grad(plain, (x, w, b))
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    truth = torch.autograd.grad(
        torch.nn.functional.cross_entropy(torch.nn.functional.linear(*wide), y, reduction=reduction).sum(), wide
    )
    for one, other, true in zip(found, expected, truth, strict=True):
        assert one.dtype == torch.float32
        assert (one - true).norm() <= 1.2 * (other - true).norm()


def test_autocast_leaves_float64_alone(target: Target) -> None:
    if not target.takes("float64"):
        return
    x, w, y = drawn(target)
    with torch.autocast(target.device.split(":")[0], dtype=torch.bfloat16):
        assert xent.linear_cross_entropy(x.double(), w.double(), y, backend=target.name).dtype == torch.float64
        with pytest.raises(TypeError, match="linear_weight must have the dtype of input"):
            xent.linear_cross_entropy(x, w.double(), y, backend=target.name)


def test_tensors_of_two_devices_are_refused(target: Target) -> None:
    x, w, y = (tensor.detach().to("meta") for tensor in drawn(target))
    placed = torch.zeros(6, device=target.device)
    with pytest.raises(ValueError, match=f"must be on one device: input is on meta, target on {target.device}"):
        xent.linear_cross_entropy(x, w, placed.long())
    with pytest.raises(ValueError, match=f"input is on meta, sample_weight on {target.device}"):
        xent.linear_cross_entropy(x, w, y, sample_weight=placed)
    assert xent.linear_cross_entropy(x, w, y, normalizer=torch.tensor(3)).device.type == "meta"


def test_uint64_targets_are_refused(target: Target) -> None:
    x, _, y = drawn(target)
    with pytest.raises(TypeError, match=r"target must hold class indices .* got dtype uint64"):
        xent.cross_entropy(x, y.to(torch.uint64))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mode", ["plain tensors", "no_grad", "inference_mode"])
def test_compiles_without_gradients(target: Target, function: str, mode: str) -> None:
    loss = losses(target)[function]
    x, w, y = drawn(target)
    if mode == "plain tensors":
        x, w = x.detach(), w.detach()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    context = {"plain tensors": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with context[mode]():
        torch.testing.assert_close(compiled(x, w, y, 0.1), loss(x, w, y, 0.1))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inplace_in_a_compiled_graph_leaves_what_others_saved(target: Target, reduction: str) -> None:
    x, _, y = drawn(target)

    def loss(x: Tensor, inplace: bool) -> Tensor:
        return xent.cross_entropy(x.exp(), y % 8, inplace=inplace, reduction=reduction, backend=target.name).sum()

    (expected,) = torch.autograd.grad(loss(x, False), x)
    (found,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x, True), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("normalizer", [3, 3.3])
def test_compiles_with_a_number_as_normalizer(target: Target, normalizer: float) -> None:
    x, _, y = drawn(target)
    x = x.detach().double() if target.takes("float64") else x

    def loss(x: Tensor, normalizer: float) -> Tensor:
        return xent.cross_entropy(x, y % 8, normalizer=normalizer, backend=target.name)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(x, normalizer), loss(x, normalizer), rtol=1e-12 if x.itemsize == 8 else 1e-6, atol=0
    )


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


@pytest.mark.parametrize(
    *crossed(
        option=["label_smoothing", "z_loss", "softcap", "logit_scale", "normalizer"],
        kind=[np.float64, np.float32, np.array],
        constant=[False, True],
    )
)
def test_compiles_with_numpy_numbers(target: Target, option: str, kind: Any, constant: bool) -> None:
    x, _, y = drawn(target)
    number = kind(0.5)
    expected = xent.cross_entropy(x, y % 8, backend=target.name, **{option: 0.5})

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: Tensor, value: Any) -> Any:
        return xent.cross_entropy(x, y % 8, backend=target.name, **{option: number if constant else value})

    torch.testing.assert_close(compiled(x, number), expected)


def test_default_dtype_and_device_do_not_matter(target: Target) -> None:
    x, _, y = drawn(target)
    expected = xent.cross_entropy(x, y % 8, backend=target.name)
    with torch.device("meta"):
        assert torch.equal(xent.cross_entropy(x, y % 8, backend=target.name), expected)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(xent.cross_entropy(x, y % 8, backend=target.name), expected)
    finally:
        torch.set_default_dtype(torch.float32)


TWICE = """
import pytest, torch, xent
x, y = torch.randn(6, 8, device={device!r}), torch.arange(6, device={device!r})
def penalty(x, reduction):
    options = {{"reduction": reduction, "backend": {name!r}}}
    return torch.func.grad(lambda x: xent.cross_entropy(x, y, **options).sum())(x).square().sum()
def check(backend, reduction):
    torch._dynamo.reset()
    with pytest.raises(Exception, match="xent computes no second derivatives"):
        if {inside}:
            torch.compile(torch.func.grad(penalty), backend=backend)(x, reduction)
        else:
            torch.compile(penalty, backend=backend)(x.requires_grad_(), reduction).backward()
for backend, reduction in {cases!r}:
    check(backend, reduction)
"""


@pytest.mark.parametrize("inside", [True, False])
def test_second_derivative_of_compiled_torch_func_raises(target: Target, inside: bool) -> None:
    """Runs in a separate process, because an error in the graph of two transforms does not leave them."""
    cases = [("aot_eager", "mean")] if inside else [("eager", "mean"), ("aot_eager", "none")]
    program = TWICE.format(device=target.device, name=target.name, inside=inside, cases=cases)
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("how", ["checkpoint in a region", "region in a checkpoint", "grad in a region"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_with_checkpoints_and_gradients_inside(target: Target, how: str, reduction: str) -> None:
    x, _, y = drawn(target)

    def loss(x: Tensor) -> Tensor:
        return xent.cross_entropy(x * 2, y % 8, reduction=reduction, backend=target.name).sum() * 3

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
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("forward", ["eager", "compiled"])
def test_compiled_autograd(target: Target, reduction: str, forward: str) -> None:
    x, _, y = drawn(target)

    def loss(x: Tensor) -> Tensor:
        return xent.cross_entropy(x * 2, y % 8, reduction=reduction, backend=target.name).sum()

    (expected,) = torch.autograd.grad(loss(x), x)
    function = torch.compile(loss, backend="aot_eager") if forward == "compiled" else loss
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        function(x).backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_by_make_fx(target: Target, reduction: str, mode: str) -> None:
    x, _, y = (tensor.detach() for tensor in drawn(target))

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return xent.cross_entropy(x, y % 8, reduction=reduction, backend=target.name).sum()

        return torch.func.grad(loss)(x)

    traced = make_fx(gradient, tracing_mode=mode)(x, y)
    torch.testing.assert_close(traced(x + 1, y), gradient(x + 1, y))


OPTIONS = {
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
@pytest.mark.parametrize("function", FUNCTIONS)
def test_graphs_have_no_tensors_of_options(target: Target, function: str, options: str) -> None:
    """A CPU tensor in a graph prevents CUDA graphs."""
    found = []
    inputs = []

    def note(graph: torch.fx.GraphModule, example: Any) -> Any:
        found.extend(constants_of(graph))
        inputs.append(sum(isinstance(one, Tensor) and one.dim() == 0 and one.dtype == torch.float64 for one in example))
        return make_boxed_func(graph.forward)

    x, w, classes = drawn(target)
    classes[2] = -100
    given = OPTIONS[options] | {"backend": target.name}

    def loss(x: Tensor, w: Tensor) -> Tensor:
        if function == "cross_entropy":
            made = xent.cross_entropy(x @ w.t(), classes, **given)
        else:
            made = xent.linear_cross_entropy(x, w, classes, **given)
        return made.sum()

    compiled = torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=note, bw_compiler=note))
    made, expected = compiled(x, w), loss(x, w)
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, (x, w)) for one in (made, expected)))
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
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("compiles", [False, True])
def test_options_that_are_tensors_never_recompile(target: Target, function: str, option: str, compiles: bool) -> None:
    """The results are those of the same numbers."""
    x, w, classes = drawn(target)
    classes[2] = -100

    def loss(x: Tensor, w: Tensor, value: Any) -> Tensor:
        options = {option: value, "backend": target.name}
        if function == "cross_entropy":
            made = xent.cross_entropy(x @ w.t(), classes, **options)
        else:
            made = xent.linear_cross_entropy(x, w, classes, **options)
        return made

    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiles else loss
    leaves = [x, w]
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
