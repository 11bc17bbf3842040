"""The divisor of a mean, the rows that count, and upstream gradients of any layout, against float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.covering import crossed
from tests.targets import Target
from xent.backends import TABLE

V = 37
ROWS = [(0,), (), (1,), (3, 5), (2, 129)]
DTYPES = [torch.float32, torch.float16]
REDUCTIONS = ["mean", "sum", "none"]


def draw(target: Target, rows: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return logits and classes, a third of them ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*rows, V, generator=generator).to(target.device, dtype)
    classes = torch.randint(V, rows, generator=generator)
    classes.view(-1)[1::3] = -100
    return logits, classes.to(target.device)


def check(target: Target, logits: Tensor, wanted: Tensor, upstream: float = 1.5, **options: Any) -> None:
    """Compare the loss, its gradient and the number of rows with a plain computation in float64."""
    leaf, wide = logits.detach().requires_grad_(), logits.detach().cpu().double().requires_grad_()
    found, stats = xent.cross_entropy(leaf, wanted, stats=("count", "lse"), backend=target.name, **options)
    of_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}
    of_cpu = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in of_cpu.items()}
    labels = wanted.cpu() if not wanted.is_floating_point() else wanted.cpu().double()
    expected = TABLE["torch"]().harness("cpu").unfused_loss(wide, labels, **of_cpu)
    torch.testing.assert_close(found.detach().cpu().double(), expected.detach(), rtol=4e-6, atol=1e-30)
    made, right = (
        torch.autograd.grad(one, of, torch.full_like(one, upstream))[0] for one, of in ((found, leaf), (expected, wide))
    )
    close = 3e-6 if logits.dtype == torch.float32 else 2.0**-10
    smallest = float(right.abs().max()) * close + 2.0**-24 if right.numel() else 0
    torch.testing.assert_close(made.cpu().double(), right, rtol=close, atol=smallest)
    counted = (
        wanted.shape.numel() if labels.is_floating_point() else (wanted != options.get("ignore_index", -100)).sum()
    )
    if not labels.is_floating_point():
        assert int(stats.count) == int(counted)
    alone = xent.cross_entropy(logits, wanted, backend=target.name, **options)
    assert torch.equal(alone, found.detach())


@pytest.mark.parametrize(*crossed(rows=ROWS, dtype=DTYPES, reduction=REDUCTIONS))
def test_sizes(target: Target, rows: tuple[int, ...], dtype: torch.dtype, reduction: str) -> None:
    check(target, *draw(target, rows, dtype), reduction=reduction)


def test_many_rows(target: Target) -> None:
    """More than one block of 4096 rows."""
    logits, classes = draw(target, (4100,))
    found = xent.cross_entropy(logits, classes, backend=target.name)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, classes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", [("weight",), ("sample_weight",), ("weight", "sample_weight")], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights(target: Target, dtype: torch.dtype, names: tuple[str, ...], reduction: str) -> None:
    weights = {"weight": torch.rand(V, device=target.device), "sample_weight": torch.rand(4, 41, device=target.device)}
    weights["weight"][::4] = 0
    weights["sample_weight"].view(-1)[::5] = 0
    check(target, *draw(target, (4, 41), dtype), reduction=reduction, **{name: weights[name] for name in names})


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_of_weights(target: Target, dtype: torch.dtype) -> None:
    sample = (3 * torch.rand(3, 5)).to(target.device, dtype)
    logits, classes = draw(target, (3, 5))
    options: dict[str, Any] = {"sample_weight": sample}
    if dtype.is_floating_point:
        options["weight"] = torch.rand(V).to(target.device, dtype)
    found = xent.cross_entropy(logits, classes, backend=target.name, **options)
    wide = {name: value.double().float() for name, value in options.items()}
    torch.testing.assert_close(found, xent.cross_entropy(logits, classes, backend=target.name, **wide))


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e5, 1e30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mean_does_not_depend_on_the_size_of_weights(target: Target, size: float, dtype: torch.dtype) -> None:
    logits, classes = draw(target, (3, 5), dtype)
    outcome = []
    for sample in (torch.full((3, 5), size), torch.ones(3, 5)):
        leaf = logits.clone().requires_grad_()
        loss = xent.cross_entropy(leaf, classes, sample_weight=sample.to(target.device), backend=target.name)
        outcome.append((loss.detach(), *torch.autograd.grad(1024 * loss, leaf)))
    for one, other in zip(*outcome, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("number", [0.0, 1.0, 1e-20, 12345.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [None, torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_normalizer(target: Target, number: float, dtype: torch.dtype, kind: torch.dtype | None) -> None:
    normalizer = number if kind is None else torch.tensor(number).to(target.device, kind)
    exact = float(normalizer)
    logits, classes = draw(target, (3, 5), dtype)
    found, expected = (
        xent.cross_entropy(logits, classes, normalizer=one, backend=target.name) for one in (normalizer, exact)
    )
    assert torch.equal(found, expected)
    if number != 1e-20 or dtype == torch.float32:
        upstream = 1.5 if number != 1e-20 else 1e-20
        check(target, logits, classes, upstream=upstream, normalizer=exact, sample_weight=torch.rand(3, 5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("nothing", ["ignored", "class weight", "sample weight"])
def test_nothing_to_average(target: Target, dtype: torch.dtype, reduction: str, nothing: str) -> None:
    logits, classes = draw(target, (3, 5), dtype)
    options: dict[str, Any] = {"reduction": reduction}
    if nothing == "ignored":
        classes[:] = -100
    elif nothing == "class weight":
        options["weight"] = torch.zeros(V, device=target.device)
    else:
        options["sample_weight"] = torch.zeros(3, 5, device=target.device)
    leaf = logits.requires_grad_()
    loss = xent.cross_entropy(leaf, classes, backend=target.name, **options)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    assert not loss.any()
    assert not grad.any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("rows", "ignored"), [(0, False), (3, True), (300, True)])
@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
def test_nothing_to_count(target: Target, function: str, rows: int, ignored: bool, reduction: str) -> None:
    classes = torch.full((rows,), -100 if ignored else 0, device=target.device)
    given = [torch.randn(rows, V), torch.randn(V, V)][: 1 + (function == "linear_cross_entropy")]
    leaves = [tensor.to(target.device).requires_grad_() for tensor in given]
    options = {"reduction": reduction, "stats": ("count", "accuracy"), "backend": target.name}
    _, stats = getattr(xent, function)(*leaves, classes, **options)
    assert (int(stats.count), float(stats.accuracy)) == (0, 0.0)


@pytest.mark.parametrize("ignore_index", [-100, 0, 5, V, 255])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_ignore_index(target: Target, ignore_index: int, dtype: torch.dtype) -> None:
    logits, _ = draw(target, (3, 5))
    classes = torch.randint(V, (3, 5), generator=torch.Generator().manual_seed(1))
    if torch.iinfo(dtype).min <= ignore_index <= torch.iinfo(dtype).max:
        classes[1:, ::2] = ignore_index
    check(target, logits, classes.to(target.device, dtype), ignore_index=ignore_index)


def test_strides_of_classes_and_weights(target: Target) -> None:
    logits, classes = draw(target, (5, 6))
    sample, weight = torch.rand(5, 6, device=target.device), torch.rand(V, 2, device=target.device)
    outcome = [
        xent.cross_entropy(logits, y, sample_weight=a, weight=w, reduction=reduction, backend=target.name)
        for reduction in ("mean", "none")
        for y, a, w in (
            (classes, sample, weight[:, 0].contiguous()),
            (classes.t().contiguous().t(), sample.repeat_interleave(2, 1)[:, ::2], weight[:, 0]),
        )
    ]
    assert torch.equal(outcome[0], outcome[1])
    assert torch.equal(outcome[2], outcome[3])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_class_probabilities(target: Target, reduction: str, dtype: torch.dtype) -> None:
    logits, _ = draw(target, (3, 5), dtype)
    given = torch.rand(3, 5, V).softmax(-1).to(target.device)
    sample = torch.rand(3, 5, device=target.device)
    sample[1] = 0
    weight = torch.rand(V, device=target.device)
    for options in ({}, {"weight": weight}, {"sample_weight": sample}):
        check(target, logits, given, reduction=reduction, **options)


@pytest.mark.parametrize("shift", [0, 1, 4, 5, 1499])
@pytest.mark.parametrize("rows", [(3, 5), (2, 70)])
def test_shifts_move_classes_and_weights(target: Target, rows: tuple[int, ...], shift: int) -> None:
    _, classes = draw(target, rows)
    hidden, weight = torch.randn(*rows, 8, device=target.device), torch.randn(V, 8, device=target.device)
    sample = torch.rand(rows, device=target.device)
    moved, weights = torch.full_like(classes, -100), torch.zeros_like(sample)
    kept = max(rows[1] - shift, 0)
    moved[:, :kept], weights[:, :kept] = classes[:, shift:], sample[:, shift:]
    for reduction in ("mean", "none"):
        found, expected = (
            xent.linear_cross_entropy(
                hidden, weight, y, sample_weight=a, shift=k, reduction=reduction, stats=("count",), backend=target.name
            )
            for y, a, k in ((classes, sample, shift), (moved, weights, 0))
        )
        torch.testing.assert_close(found[0], expected[0])
        assert int(found[1].count) == int(expected[1].count)


@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize("weights", ["none", "weights", "zero", "cancelling", "all ignored"])
@pytest.mark.parametrize("count", [1, 16, 17, 256, 257])
def test_rows_of_any_number(target: Target, count: int, weights: str, function: str) -> None:
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(V, (count,), generator=generator)
    classes[torch.rand(count, generator=generator) < 0.3] = -100
    sample = torch.rand(count, generator=generator) * (torch.rand(count, generator=generator) < 0.7)
    classes, sample, weight = classes.to(target.device), sample.to(target.device), torch.rand(V, device=target.device)
    classes[0] = 3
    if weights == "none":
        sample, weight = None, None
    elif weights == "zero":
        sample = torch.zeros_like(sample)
    elif weights == "cancelling":
        sample[:] = 0
        sample[0], sample[-1] = (1, -1) if count > 1 else (0, 0)
        classes[-1], weight = classes[0], None
    elif weights == "all ignored":
        classes[:] = -100
    given = [torch.randn(count, V, generator=generator)]
    if function == "linear_cross_entropy":
        given = [torch.randn(count, 5, generator=generator), torch.randn(V, 5, generator=generator)]
        given[0][classes.cpu() == -100] = torch.nan  # must not reach the classifier's gradient
        if weights == "cancelling":
            given[0][0] = torch.nan
    options = {"weight": weight, "sample_weight": sample}
    results = []
    for backend, dtype in ((target.name, torch.float32), ("torch", torch.float64)):
        leaves = [tensor.to(target.device, dtype).requires_grad_() for tensor in given]
        placed = {name: None if value is None else value.to(dtype) for name, value in options.items()}
        loss = getattr(xent, function)(*leaves, classes, backend=backend, **placed)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected.double(), rtol=2e-5, atol=2e-6)


UPSTREAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it comes": lambda rows: rows,
    "expanded": lambda rows: rows[:1, :1].expand(rows.shape),
    "expanded over rows": lambda rows: rows[:1].expand(rows.shape),
    "transposed": lambda rows: rows.t().contiguous().t(),
    "every other": lambda rows: rows.repeat_interleave(2, -1)[:, ::2],
}


@pytest.mark.parametrize("layout", UPSTREAMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_upstream(target: Target, layout: str, dtype: torch.dtype) -> None:
    """The upstream gradient of the rows' losses. Logits are all 0, so that their gradient shows it."""
    torch.manual_seed(1)
    upstream = UPSTREAMS[layout](torch.randn(2, 7, device=target.device))
    _, classes = draw(target, (2, 7))
    leaf = torch.zeros(2, 7, V, dtype=dtype, device=target.device, requires_grad=True)
    loss = xent.cross_entropy(leaf, classes, reduction="none", backend=target.name)
    (grad,) = torch.autograd.grad(loss, leaf, upstream)
    rows = classes.flatten()
    expected = torch.full((14, V), 1 / V, device=target.device)
    expected[torch.arange(14, device=target.device), rows.clamp(min=0)] -= 1
    expected *= (upstream.reshape(14) * (rows >= 0))[:, None]
    close = 2e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(grad.view(14, V).float(), expected, rtol=close, atol=0)
