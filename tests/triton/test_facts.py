"""The divisor of a mean and the order of rows, each computed by one launch, against PyTorch's operations."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target
from xent.backends.torch import facts as plain
from xent.backends.torch import logits as logits_driver
from xent.backends.torch.job import Upstream
from xent.backends.torch.options import Options
from xent.backends.triton.facts_kernels import divisor_kernel, partition_kernel
from xent.backends.triton.job import TritonJob
from xent.core.spec import LossSpec

V = 37
# One row, a few rows, and more rows than one block of the divisor kernel.
ROWS = [(1,), (3, 5), (2, 2049)]
STATS = ("count", "lse")


def make_options(on: Target, rows: tuple[int, ...], **given: Any) -> Options:
    """Return the options of a mean over rows, some of them ignored; `given` are fields of Options and of the spec."""
    torch.manual_seed(0)
    classes = torch.randint(V, rows)
    classes.view(-1)[1::3] = -100
    fields = {name: given.pop(name, None) for name in Options._fields[1:-2]}
    fields |= {"target": given.pop("target", classes)}
    placed = {name: value.to(on.device) if isinstance(value, Tensor) else value for name, value in fields.items()}
    return Options(**placed, spec=LossSpec(**{"reduction": "mean", **given}), kernel="triton")


def check(options: Options, dtype: torch.dtype = torch.float32, shift: int = 0) -> TritonJob:
    """Compare divisor, order of rows and count with PyTorch's. Return the job."""
    narrow = dtype == torch.float16
    facts = plain.gather_facts(options, V, dtype, shift, narrow=narrow)
    job = TritonJob(options, V, dtype, shift, None, narrow)
    close = {"rtol": 1e-6, "atol": 0.0, "equal_nan": True}  # the terms of sums have another order
    if job.facts.scratch is not None:
        divisor, inverse, rest = job.facts.scratch
        if facts.divisor is not None:
            expected = torch.as_tensor(facts.divisor, dtype=torch.float32, device=divisor.device)
            torch.testing.assert_close(divisor, expected, **close)
        # The factors of a gradient in the forward and in the backward pass.
        if facts.deferred is None:
            torch.testing.assert_close(facts.weight * inverse, facts.scale, **close)
        else:
            assert job.deferred is not None
            assert float(job.deferred) == float(rest)
            torch.testing.assert_close(rest, facts.deferred, **(close | {"rtol": 1e-3 if rest > 1e38 else 1e-6}))
            if rest:
                torch.testing.assert_close(
                    facts.weight * inverse, facts.scale, **(close | {"rtol": 1e-3 if rest > 1e38 else 1e-6})
                )
    ignored = torch.zeros_like(facts.weight, dtype=torch.bool) if facts.ignored is None else facts.ignored
    if "count" in options.spec.stats:
        assert int(job.facts.counted) == int((~ignored).sum())
    if job.device.type == "cpu" or not torch.cuda.is_current_stream_capturing():
        order, number = job.partition(True)
        idle = ignored if options.spec.stats else facts.weight == 0
        assert int(number) == int((~idle).sum())
        if order is None:
            assert not idle.any()
        else:
            assert torch.equal(order, idle.argsort(stable=True))
    return job


@pytest.mark.parametrize("rows", [(0,), (), *ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("stats", [(), STATS])
def test_sizes(
    target: Target, rows: tuple[int, ...], dtype: torch.dtype, reduction: str, stats: tuple[str, ...]
) -> None:
    check(make_options(target, rows, reduction=reduction, stats=stats), dtype)


@pytest.mark.parametrize("rows", [(3, 5), (2, 1500)])
@pytest.mark.parametrize("shift", [0, 1, 4, 5, 1499, 10_000])
def test_shift(target: Target, rows: tuple[int, ...], shift: int) -> None:
    check(make_options(target, rows, sample_weight=torch.rand(rows), stats=("count",)), shift=shift)
    check(make_options(target, rows, sample_weight=torch.rand(rows)), shift=shift)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("names", [("weight",), ("sample_weight",), ("weight", "sample_weight")])
@pytest.mark.parametrize("stats", [(), STATS])
def test_weights(target: Target, dtype: torch.dtype, names: tuple[str, ...], stats: tuple[str, ...]) -> None:
    rows = (4, 41)
    weights = {"weight": torch.rand(V), "sample_weight": torch.rand(rows)}
    weights["weight"][::4] = 0
    weights["sample_weight"].view(-1)[::5] = 0
    given = {name: weights[name] for name in names}
    for reduction in ("mean", "sum", "none"):
        check(make_options(target, rows, reduction=reduction, stats=stats, **given), dtype, shift=1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_of_weights(target: Target, dtype: torch.dtype) -> None:
    sample = (3 * torch.rand(3, 5)).to(dtype)
    check(make_options(target, (3, 5), sample_weight=sample))
    if dtype.is_floating_point:
        check(make_options(target, (3, 5), weight=torch.rand(V).to(dtype), sample_weight=sample))


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e5, 1e30, float("inf")])
def test_float16_does_not_depend_on_the_size_of_weights(target: Target, size: float) -> None:
    options = make_options(target, (3, 5), sample_weight=torch.full((3, 5), size))
    found = check(options, torch.float16)
    if size < 1e30:
        assert float(found.facts.scratch[1]) * size == pytest.approx(1)


@pytest.mark.parametrize("number", [0.0, 1.0, 1e-20, 12345.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [None, torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_normalizer(target: Target, number: float, dtype: torch.dtype, kind: torch.dtype | None) -> None:
    normalizer = number if kind is None else torch.tensor(number).to(kind)
    check(make_options(target, (3, 5), sample_weight=torch.rand(3, 5), normalizer=normalizer), dtype)


def test_normalizer_on_the_cpu(target: Target) -> None:
    options = make_options(target, (3, 5))._replace(normalizer=torch.tensor(7.0))
    assert float(check(options).facts.scratch[0]) == 7


def test_normalizer_does_not_divide_a_sum(target: Target) -> None:
    for reduction in ("sum", "none"):
        for normalizer in (7.0, torch.tensor(7.0)):
            check(make_options(target, (3, 5), reduction=reduction, normalizer=normalizer), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("nothing", ["ignored", "class weight", "sample weight"])
def test_nothing_to_average(target: Target, dtype: torch.dtype, reduction: str, nothing: str) -> None:
    given: dict[str, Any] = {
        "ignored": {"target": torch.full((3, 5), -100)},
        "class weight": {"weight": torch.zeros(V)},
        "sample weight": {"sample_weight": torch.zeros(3, 5)},
    }[nothing]
    check(make_options(target, (3, 5), reduction=reduction, **given), dtype)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("rows", "ignored"), [(0, False), (3, True), (300, True)])
@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.filterwarnings("ignore:Deterministic behavior")
def test_nothing_to_count(target: Target, function: str, rows: int, ignored: bool, reduction: str) -> None:
    """No launch needs the divisor then, but the statistics do."""
    classes = torch.full((rows,), -100 if ignored else 0, device=target.device)
    given = [torch.randn(rows, V), torch.randn(V, V)][: 1 + (function == "linear_cross_entropy")]
    leaves = [tensor.to(target.device).requires_grad_() for tensor in given]
    options = {"reduction": reduction, "stats": ("count", "accuracy"), "backend": target.name}
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory
    try:
        _, stats = getattr(xent, function)(*leaves, classes, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (int(stats.count), float(stats.accuracy)) == (0, 0.0)


@pytest.mark.parametrize("ignore_index", [-100, 0, 5, V, 255])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_ignore_index(target: Target, ignore_index: int, dtype: torch.dtype) -> None:
    classes = torch.randint(V, (3, 5))
    if torch.iinfo(dtype).min <= ignore_index <= torch.iinfo(dtype).max:
        classes[1:, ::2] = ignore_index
    options = make_options(target, (3, 5), target=classes.to(dtype), ignore_index=ignore_index, stats=("count",))
    assert int(check(options).facts.counted) == int((classes != ignore_index).sum())


def test_any_strides(target: Target) -> None:
    classes, sample, weight = torch.randint(V, (5, 6)), torch.rand(5, 6), torch.rand(V, 2)
    expected = check(make_options(target, (3, 5), target=classes, sample_weight=sample, weight=weight[:, 0]))
    given = {"target": classes.t().contiguous().t(), "sample_weight": sample.repeat_interleave(2, 1)[:, ::2]}
    found = check(make_options(target, (3, 5), weight=weight[:, 0].contiguous(), **given))
    assert torch.equal(found.facts.scratch, expected.facts.scratch)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_class_probabilities(target: Target, reduction: str, dtype: torch.dtype) -> None:
    sample = torch.rand(3, 5)
    sample[1] = 0
    for given in ({}, {"weight": torch.rand(V)}, {"sample_weight": sample}, {"normalizer": 3.0}):
        check(make_options(target, (3, 5), target=torch.rand(3, 5, V), reduction=reduction, **given), dtype, shift=2)


@pytest.mark.parametrize("wrong", [V, -1, 2**31 - 1, 2**40, -(2**40)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("length", [10, 100])
def test_targets_out_of_range(
    target: Target, length: int, wrong: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = torch.randint(V, (3, length))
    classes[1, 7] = wrong
    given = {"weight": torch.rand(V), "sample_weight": torch.rand(3, length)} if weighted else {}
    if weighted:
        given["sample_weight"][1, 7] = 0  # this does not hide an invalid target, as in PyTorch's operations
    options = make_options(target, (3, length), target=classes, **given)
    if target.device == "cpu":
        with pytest.raises(IndexError, match=rf"target\[1, 7\] is {wrong}; classes are 0 to {V - 1}"):
            TritonJob(options, V, torch.float32, 0, None, False)
        monkeypatch.setattr(plain, "looks_at_targets", lambda device: False)  # as on a GPU
    for dtype in (torch.float32, torch.float16):
        assert check(options, dtype).facts.scratch.isfinite().all()
    logits = torch.randn(3, length, V, device=target.device)
    grads = [torch.empty_like(logits) for _ in range(2)]
    for grad, classes in zip(grads, (options.target, options.target.clone()), strict=True):
        if grad is grads[1]:
            classes[1, 7] = -100
        logits_driver.forward(logits, grad, None, options._replace(target=classes))
    assert grads[0][1, 7].isnan().all()
    grads[0][1, 7] = 0
    torch.testing.assert_close(*grads)


def rows_of_facts(on: Target, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return targets, weights and class weights of `count` rows, a third of them ignored and others with weight 0."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(V, (count,), generator=generator)
    classes[torch.rand(count, generator=generator) < 0.3] = -100
    sample = torch.rand(count, generator=generator) * (torch.rand(count, generator=generator) < 0.7)
    return classes.to(on.device), sample.to(on.device), torch.rand(V, generator=generator).to(on.device)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 32, 100, 129])
@pytest.mark.parametrize("all_rows", [False, True])
@pytest.mark.parametrize("programs", [1, 2, 20])
def test_partition_in_many_blocks(target: Target, count: int, all_rows: bool, programs: int) -> None:
    classes, sample, weight = rows_of_facts(target, count)
    order = torch.full((count,), -1, device=target.device)
    number = torch.full((), -1, device=target.device)
    partition_kernel[(programs,)](
        classes, sample, weight, order, number, count, count, 0, -100, V,
        SHIFTED=False, ALL_ROWS=all_rows, COUNTED=32, BLOCK=16,
    )  # fmt: skip
    idle = classes == -100 if all_rows else (classes == -100) | (sample == 0)
    assert int(number) == int((~idle).sum())
    assert torch.equal(order, idle.argsort(stable=True))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("narrow", [False, True])
def test_divisor_in_many_blocks(target: Target, count: int, narrow: bool) -> None:
    classes, sample, weight = rows_of_facts(target, count)
    classes[0] = 3
    scratch, counted = torch.empty(3, device=target.device), torch.empty((), dtype=torch.int64, device=target.device)
    divisor_kernel[(1,)](
        classes, sample, weight, None, scratch, counted, 0.0, count, count, 0, -100, V,
        SHIFTED=False, MEAN=True, NUMBER=False, NARROW=narrow, PROBABILITIES=False, BLOCK=16,
    )  # fmt: skip
    alive = classes != -100
    parts = torch.where(alive, sample * weight[classes.clamp(min=0)], 0).double()
    total, largest = float(parts.sum()), float(parts.max()) or 1.0
    inverse = 1 / total if total else 0.0
    expected = [total, 1 / largest if narrow and total else inverse, inverse * largest if narrow else 1.0]
    np.testing.assert_allclose(scratch.cpu().numpy(), expected, rtol=1e-6)
    assert int(counted) == int(alive.sum())


@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize("weights", ["none", "weights", "zero", "cancelling", "all ignored"])
@pytest.mark.parametrize("count", [1, 16, 17, 256, 257])
def test_divisor_of_few_rows(target: Target, count: int, weights: str, function: str) -> None:
    """Up to 256 rows without weights, the first kernel of a call computes the divisor."""
    classes, sample, weight = rows_of_facts(target, count)
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
    generator = torch.Generator().manual_seed(1)
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
    "flat": lambda rows: rows.flatten(),
    "bfloat16": lambda rows: rows.bfloat16(),
}


@pytest.mark.parametrize("layout", UPSTREAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_upstream(target: Target, layout: str, dtype: torch.dtype) -> None:
    """The upstream gradient of the rows' losses. Logits are all 0, so that their gradient shows it."""
    torch.manual_seed(1)
    upstream = UPSTREAMS[layout](torch.randn(2, 7, device=target.device))
    job = TritonJob(make_options(target, (2, 7), reduction="none"), V, dtype, 0, Upstream(upstream), False)
    logits = torch.zeros(2, 7, V, dtype=dtype, device=target.device)
    grad, norm = torch.empty_like(logits), torch.zeros(3, 14, device=target.device)
    norm[1], norm[2] = V - 1, V
    job.gradient(logits, grad, norm, None)
    classes = job.facts.target.flatten()
    expected = torch.full((14, V), 1 / V, device=target.device)
    expected[torch.arange(14, device=target.device), classes.clamp(min=0)] -= 1
    expected *= (upstream.reshape(14).float() * (classes >= 0))[:, None]
    torch.testing.assert_close(
        grad.view(14, V).float(), expected, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=0
    )
