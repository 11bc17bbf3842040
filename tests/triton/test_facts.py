"""The facts of all rows, which one launch finds, are those that PyTorch's operations find, field by field."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.targets import Target
from xent.backends.torch import facts as plain
from xent.backends.torch.facts import Facts
from xent.backends.torch.options import Options, pack_numbers
from xent.backends.triton import facts as in_triton
from xent.backends.triton.facts import gather_facts
from xent.core.spec import LossSpec

V = 37
# One row, part of a block of 1024, a block, one row more than a block, several; more than are added up at once.
ROWS = [(1,), (3, 5), (1024,), (1025,), (4, 1541), (2, 4097)]


def make_options(on: Target, rows: tuple[int, ...], **given: Any) -> Options:
    """Return a mean over rows of which some are ignored, with `given` in place of what it has."""
    torch.manual_seed(0)
    classes = torch.randint(V, rows)
    classes.view(-1)[1::3] = -100
    options = Options(
        classes, None, None, None, pack_numbers(LossSpec("mean"), None), -100, False, False, "mean", [], "triton"
    )
    given = {"target": classes} | given
    placed = {name: value.to(on.device) if isinstance(value, Tensor) else value for name, value in given.items()}
    return options._replace(**placed)


def check(options: Options, dtype: torch.dtype = torch.float32, **more: Any) -> Facts:
    """Compare both; return what Triton found."""
    found, expected = (gather(options, V, dtype, **more) for gather in (gather_facts, plain.gather_facts))
    no = torch.zeros_like(expected.ignored)
    # None stands for what is known of no row.
    expected = replace(
        expected,
        dead=no if expected.dead is None else expected.dead,
        invalid=no if expected.invalid is None else expected.invalid,
    )
    for field in fields(Facts):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, Tensor):
            # Sums are in another order; they are in the divisor, and by way of it in other factors.
            close = 1e-6 if other.is_floating_point() else 0
            torch.testing.assert_close(
                one, other, rtol=close, atol=0, equal_nan=True, msg=lambda text, field=field: f"{field.name}: {text}"
            )
        else:
            assert vars(one) == vars(other) if field.name == "spec" else one == other, field.name
    return found


@pytest.mark.parametrize("rows", [(0,), (), *ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_sizes(target: Target, rows: tuple[int, ...], dtype: torch.dtype, reduction: str) -> None:
    check(make_options(target, rows, reduction=reduction), dtype)


def test_more_blocks_than_programs(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_triton, "_PROGRAMS", 2)
    check(make_options(target, (4, 1541)))


@pytest.mark.parametrize("rows", [(3, 5), (2, 1500)])
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 5, 1499, 10_000])
def test_shift(target: Target, rows: tuple[int, ...], shift: int) -> None:
    check(make_options(target, rows, sample_weight=torch.rand(rows)), shift=shift)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("names", [("weight",), ("sample_weight",), ("weight", "sample_weight")])
def test_weights(target: Target, rows: tuple[int, ...], dtype: torch.dtype, names: tuple[str, ...]) -> None:
    weights = {"weight": torch.rand(V), "sample_weight": torch.rand(rows)}
    weights["weight"][::4] = 0
    weights["sample_weight"].view(-1)[::5] = 0
    given = {name: weights[name] for name in names}
    for reduction in ("mean", "sum", "none"):
        check(make_options(target, rows, reduction=reduction, **given), dtype, shift=1 if len(rows) > 1 else 0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_of_weights(target: Target, dtype: torch.dtype) -> None:
    sample = (3 * torch.rand(3, 5)).to(dtype)
    check(make_options(target, (3, 5), sample_weight=sample))
    if dtype.is_floating_point:
        check(make_options(target, (3, 5), weight=torch.rand(V).to(dtype), sample_weight=sample))


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e5, 1e30, float("inf")])
def test_float16_feels_no_size_of_weights(target: Target, size: float) -> None:
    found = check(make_options(target, (3, 5), sample_weight=torch.full((3, 5), size)), torch.float16)
    if size < 1e30:
        assert float(found.scale.max()) == pytest.approx(1)


@pytest.mark.parametrize("number", [0.0, 1.0, 1e-20, 12345.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [None, torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_normalizer(target: Target, number: float, dtype: torch.dtype, kind: torch.dtype | None) -> None:
    numbers = pack_numbers(LossSpec("mean"), number)
    given: dict[str, Any] = {"numbers": numbers.cpu(), "has_divisor": True}
    if kind is not None:
        given = {"normalizer": torch.tensor(number).to(kind)}
    options = make_options(target, (3, 5), sample_weight=torch.rand(3, 5), **given)
    if kind is None:
        options = options._replace(numbers=numbers)
    check(options, dtype)


def test_normalizer_on_the_cpu(target: Target) -> None:
    options = make_options(target, (3, 5))._replace(normalizer=torch.tensor(7.0))
    assert float(check(options).divisor) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("nothing", ["ignored", "class weight", "sample weight"])
def test_nothing_to_average(target: Target, dtype: torch.dtype, reduction: str, nothing: str) -> None:
    given: dict[str, Any] = {
        "ignored": {"target": torch.full((3, 5), -100)},
        "class weight": {"weight": torch.zeros(V)},
        "sample weight": {"sample_weight": torch.zeros(3, 5)},
    }[nothing]
    found = check(make_options(target, (3, 5), reduction=reduction, **given), dtype)
    assert bool(found.dead.all()) == (nothing != "class weight" or reduction == "mean")


@pytest.mark.parametrize("ignore_index", [-100, 0, 5, V, 255])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_ignore_index(target: Target, ignore_index: int, dtype: torch.dtype) -> None:
    classes = torch.randint(V, (3, 5))
    if dtype != torch.uint8 or ignore_index >= 0:
        classes[1:, ::2] = ignore_index
    found = check(make_options(target, (3, 5), target=classes.to(dtype), ignore_index=ignore_index))
    assert torch.equal(found.ignored.cpu(), (classes == ignore_index).flatten())


def test_any_strides(target: Target) -> None:
    classes, sample, weight = torch.randint(V, (5, 6)), torch.rand(5, 6), torch.rand(V, 2)
    expected = check(make_options(target, (3, 5), target=classes, sample_weight=sample, weight=weight[:, 0]))
    given = {"target": classes.t().contiguous().t(), "sample_weight": sample.repeat_interleave(2, 1)[:, ::2]}
    found = check(make_options(target, (3, 5), weight=weight[:, 0].contiguous(), **given))
    assert torch.equal(found.weight, expected.weight)
    assert torch.equal(found.target, expected.target)


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
    torch.manual_seed(1)
    upstream = UPSTREAMS[layout](torch.randn(3, 1000, device=target.device))
    found = check(make_options(target, (3, 1000), reduction="none"), dtype, upstream=upstream)
    assert found.scale.count_nonzero() == (~found.ignored).sum()


@pytest.mark.parametrize("wrong", [V, -1, 2**31 - 1, 2**40, -(2**40)])
@pytest.mark.parametrize("weighted", [False, True])
def test_targets_out_of_range(target: Target, wrong: int, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = torch.randint(V, (3, 1000))
    classes[1, 7] = wrong
    given = {"weight": torch.rand(V), "sample_weight": torch.rand(3, 1000)} if weighted else {}
    if weighted:
        given["sample_weight"][1, 7] = 0  # which hides a wrong target no more than PyTorch's operations do
    options = make_options(target, (3, 1000), target=classes, **given)
    if target.device == "cpu":
        with pytest.raises(IndexError, match=rf"target\[1, 7\] is {wrong}; classes are 0 to {V - 1}"):
            gather_facts(options, V, torch.float32)
        monkeypatch.setattr(plain, "looks_at_targets", lambda device: False)  # as on a GPU
    for dtype in (torch.float32, torch.float16):
        found = check(options, dtype)
        assert found.invalid.nonzero().tolist() == [[1007]]
        np.testing.assert_array_equal(found.scale.isnan().cpu(), found.invalid.cpu())
        assert found.divisor.isfinite()
