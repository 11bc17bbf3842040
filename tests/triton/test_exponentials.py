"""Exponentials in place of the gradients of logits: losses and gradients, around a stand-in for the kernel.

The kernel itself is for Hopper GPUs; `tests.triton.gpu.test_exponentials` runs it. Everything around it runs here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target
from tests.triton.sure import check_sure_targets
from xent.backends.torch import borrowed, linear, schedule
from xent.backends.torch import gradients as sums
from xent.backends.torch.gradients import Gradients
from xent.backends.triton import exponentials, kernels, tiles
from xent.backends.triton.hopper import can_be_copied
from xent.core.check.cases import Case, option_cases
from xent.core.check.judge import judge_case

TILE = 16  # classes
CASES = [
    case
    for reduction in ("mean", "none")
    for case in option_cases("linear_cross_entropy", "bfloat16")
    if case.reduction == reduction and "probabilities" not in case.name
]
ROW = -(-CASES[0].vocabulary // 8) * 8 * 2
"""Bytes of one row of bfloat16 logits."""


def make_tiles(
    product: Any,
    facts: Any,
    reference: Tensor,
    todo: Tensor | None = None,
    tile_sums: Sequence[Tensor] | None = None,
    first_tile: int = 0,
) -> None:
    """Do what the kernel does, class by class in PyTorch."""
    hidden, first, classifier, out = product.hidden, product.first, product.classifier, product.out
    assert all(map(can_be_copied, (hidden, classifier, out)))
    if todo is not None and not todo:
        return
    z, k = hidden.float() @ classifier.float().t(), facts.spec.softcap
    x = z * facts.spec.logit_scale
    x = x if k is None else k * torch.tanh(x / k)
    classes = torch.arange(first, first + len(classifier), device=x.device)
    x = x.masked_fill(classes == facts.target[:, None], -torch.inf)
    e = (x - reference[:, None]).exp()
    if tile_sums is not None:
        for index, tile in enumerate(x.split(TILE, 1)):
            tile_sums[0][first_tile + index] = tile.amax(1)
            tile_sums[1][first_tile + index] = (tile - reference[:, None]).exp().sum(1)
    slope = 1 if k is None else (1 - (x / k) ** 2).nan_to_num(neginf=0)
    out.copy_((e * slope).masked_fill(exponentials._dead(facts)[:, None], 0))


def multiply(hidden: Tensor, classifier: Tensor, facts: Any, rounded: bool, peaks: Tensor, totals: Tensor) -> None:
    """Do what the product kernel does, for forward passes whose backward makes exponentials."""
    z, k = hidden.float() @ classifier.float().t(), facts.spec.softcap
    x = (z.bfloat16().float() if rounded else z) * facts.spec.logit_scale
    x = x if k is None else k * torch.tanh(x / k)
    x = x.masked_fill(torch.arange(len(classifier), device=x.device) == facts.target[:, None], -torch.inf)
    peaks.copy_(x.amax(1))
    totals.copy_((x - peaks[:, None]).exp().sum(1))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return for each launch whether it was to do anything."""
    found: list[bool] = []

    def launch(*given: Any) -> None:
        found.append(len(given) < 4 or bool(given[3]))
        make_tiles(*given)

    monkeypatch.setattr(exponentials, "_launch", launch)
    return found


@pytest.fixture(autouse=True)
def chunks(target: Target, monkeypatch: pytest.MonkeyPatch, launches: list[bool]) -> list[int]:
    """Return the rows of each chunk that adds exponentials to the gradients."""
    found: list[int] = []
    add = Gradients.add

    def watched(self: Gradients, part: Any, hidden: Tensor, grad_logits: Tensor, factors: Any = None) -> None:
        found.extend([] if factors is None else [len(hidden)])
        add(self, part, hidden, grad_logits, factors)

    monkeypatch.setattr(Gradients, "add", watched)
    monkeypatch.setattr(exponentials, "CLASSES", TILE)
    monkeypatch.setattr(tiles, "serves", lambda hidden, weight, facts: exponentials._fits(weight, facts))
    monkeypatch.setattr(tiles, "launch_product", multiply)
    monkeypatch.setattr(linear, "classes_per_slice", lambda *_: None)
    monkeypatch.setattr(borrowed, "rows_in_gradient", lambda *_: (0, 0))

    def start(classifier: Tensor, facts: Any) -> exponentials.Exponentials | None:
        return exponentials.Exponentials(classifier, facts) if exponentials._fits(classifier, facts) else None

    monkeypatch.setattr(kernels, "KERNELS", replace(kernels.KERNELS, exponentials=start))
    return found


def draw(target: Target, rows: int = 40, vocabulary: int = 67) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (rows, 24), classifier and classes."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 24, generator=generator).bfloat16() for size in (rows, vocabulary))
    classes = torch.randint(vocabulary, (rows,), generator=generator)
    return hidden.to(target.device), weight.to(target.device), classes.to(target.device)


def gradients(
    backend: str, factors: tuple[Tensor, Tensor], classes: Tensor, asks: tuple[bool, bool] = (True, True), **kinds: Any
) -> tuple[Any, list[Tensor]]:
    """Return the result of a call and the gradients that are asked for."""
    leaves = [factor.detach().clone().requires_grad_(ask) for factor, ask in zip(factors, asks, strict=True)]
    result = xent.linear_cross_entropy(*leaves, classes, backend=backend, **kinds)
    loss = result[0] if isinstance(result, tuple) else result
    made = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad], torch.ones_like(loss))
    return result, list(made)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients(target: Target, case: Case, chunks: list[int]) -> None:
    for comparison in judge_case(target.backend, target.harness, case, workspace=20 * ROW):
        assert comparison.passed, comparison
    served = not (case.bias or "label_smoothing" in case.options or "weight" in case.options)
    assert bool(chunks) == served


@pytest.mark.parametrize("asks", [(True, False), (False, True)], ids=["input", "classifier"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_gradient_alone(target: Target, asks: tuple[bool, bool], reduction: str, chunks: list[int]) -> None:
    *factors, classes = draw(target)
    kinds = {"reduction": reduction, "workspace": 15 * ROW}
    _, both = gradients(target.name, tuple(factors), classes, **kinds)
    _, (alone,) = gradients(target.name, tuple(factors), classes, asks, **kinds)
    assert torch.equal(alone, both[asks.index(True)])
    assert chunks == [14, 14, 12] * 2


@pytest.mark.parametrize("scale", [-1, 1])
def test_rows_far_above_their_reference(target: Target, scale: float, launches: list[bool]) -> None:
    """Chunks with a loss that would overflow are made once more, and no others."""
    hidden, weight, classes = draw(target)
    for row, size in ((3, 150), (25, 80)):
        other = weight[(classes[row] + 1) % 67].float()
        hidden[row] = (scale * size * other / other.square().sum()).bfloat16()
    kinds = {"stats": ("lse", "nll"), "workspace": 10 * ROW, "logit_scale": scale}
    (loss, stats), made = gradients(target.name, (hidden, weight), classes, **kinds)
    wide = tuple(value.double().cpu() for value in (hidden, weight))
    (expected, expected_stats), right = gradients("torch", wide, classes.cpu(), **kinds)
    assert expected_stats.nll.max() > 100
    assert launches == [True, True, True, False, True, True, True, False]
    torch.testing.assert_close(loss.double().cpu(), expected, rtol=1e-5, atol=0)
    for name in ("lse", "nll"):
        torch.testing.assert_close(
            getattr(stats, name).double().cpu(), getattr(expected_stats, name), rtol=1e-5, atol=0
        )
    for found, exact in zip(made, right, strict=True):
        assert (found.double().cpu() - exact).norm() <= 4e-3 * exact.norm()


def test_small_weights_do_not_vanish(target: Target, launches: list[bool]) -> None:
    """Of rows above their reference, but not so far that a second attempt is made for other weights."""
    hidden, weight, classes = draw(target)
    classes[:] = torch.arange(40, device=target.device) % 5
    for row in range(0, 40, 3):
        other = weight[7].float()
        hidden[row] = (45 * other / other.square().sum()).bfloat16()
    kinds = {"reduction": "sum", "sample_weight": torch.full((40,), 1e-25, device=target.device)}
    loss, made = gradients(target.name, (hidden, weight), classes, **kinds)
    expected, right = gradients("torch", (hidden.double(), weight.double()), classes, **kinds)
    assert launches == [True, True]
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=0)
    for found, exact in zip(made, right, strict=True):
        assert (found.double() - exact).norm() <= 4e-3 * exact.norm() > 0


def test_rows_without_weight_cause_no_second_attempt(target: Target, launches: list[bool]) -> None:
    """Not for their statistics either, if they are not so far above their reference."""
    hidden, weight, classes = draw(target)
    other = weight[(classes[5] + 1) % 67].float()
    hidden[5] = (45 * other / other.square().sum()).bfloat16()
    weights = torch.ones(40, device=target.device)
    weights[5] = 0
    gradients(target.name, (hidden, weight), classes, stats=("lse",), sample_weight=weights)
    assert launches == [True, False]


def test_targets_alone_have_a_gradient(target: Target) -> None:
    """Where 1 + 2 zeta lse is 0, all others have none; of a frequent class that is no reason to lose its own."""
    weight, hidden = torch.zeros(67, 24), torch.zeros(8, 24)
    hidden[:, 0], weight[:, 0], weight[7, 0], weight[:, 1] = 1, -200, -8, torch.arange(67) / 64
    factors = hidden.bfloat16().to(target.device), weight.bfloat16().to(target.device)
    classes = torch.full((8,), 3, device=target.device)
    kinds = {"z_loss": 1 / 16}
    _, made = gradients(target.name, factors, classes, **kinds)
    _, right = gradients("torch", (factors[0].double(), factors[1].double()), classes, **kinds)
    for found, exact in zip(made, right, strict=True):
        assert (found.double() - exact).norm() <= 4e-3 * exact.norm() > 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_stay_alone(target: Target, value: float, launches: list[bool]) -> None:
    hidden, weight, classes = draw(target)
    hidden[7, 3] = value
    result, made = gradients(target.name, (hidden, weight), classes, (True, False), reduction="none")
    assert result.isnan().nonzero()[:, 0].tolist() == [7]
    assert made[0].isnan().any(1).nonzero()[:, 0].tolist() == [7]


def test_backward_takes_the_norm_of_the_same_logits(target: Target, chunks: list[int]) -> None:
    """Not of rounded ones, of which a row that is sure of one class would make quite another p."""
    *factors, classes = draw(target)
    kinds: dict[str, Any] = {"reduction": "none", "logit_scale": 30.0}
    _, made = gradients(target.name, tuple(factors), classes, workspace=15 * ROW, **kinds)
    _, right = gradients("torch", tuple(factor.double() for factor in factors), classes, **kinds)
    assert chunks
    for found, exact in zip(made, right, strict=True):
        assert (found.double() - exact).norm() <= 4e-3 * exact.norm()


def test_products_in_halves(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    *factors, classes = draw(target)
    _, whole = gradients(target.name, tuple(factors), classes, workspace=15 * ROW)
    monkeypatch.setattr(sums, "_WIDE", 24)
    monkeypatch.setattr(sums, "_UNIT", 8)
    _, halves = gradients(target.name, tuple(factors), classes, workspace=15 * ROW)
    assert all(torch.equal(*pair) for pair in zip(whole, halves, strict=True))


def test_sure_targets(target: Target, chunks: list[int]) -> None:
    check_sure_targets(target, 24, workspace=10 * ROW)
    assert chunks == [8, 8, 8]


@pytest.mark.parametrize("ignored", [[], [0, 1, 2, 30], list(range(40))])
def test_ignored_rows_and_statistics(target: Target, ignored: list[int]) -> None:
    """Hidden states of ignored rows are NaN, and those of one that weighs nothing."""
    hidden, weight, classes = draw(target)
    classes[ignored], hidden[ignored], hidden[5] = -100, torch.nan, torch.inf
    weights = torch.ones(40, device=target.device)
    weights[5] = 0
    kinds = {"stats": ("lse", "nll", "z_loss"), "z_loss": 0.1, "sample_weight": weights, "workspace": 9 * ROW}
    (loss, stats), made = gradients(target.name, (hidden, weight), classes, **kinds)
    (expected, expected_stats), right = gradients("torch", (hidden.float(), weight.float()), classes, **kinds)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name in ("lse", "nll", "z_loss"):
        ours, theirs = getattr(stats, name), getattr(expected_stats, name)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
    for found, exact in zip(made, right, strict=True):
        assert (found.float() - exact).norm() <= 4e-3 * exact.norm()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rare_targets_are_added_apart(target: Target, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 4 rows of a class; those of others are among the exponentials, and their terms cancel there."""
    found: list[tuple[Tensor, Tensor]] = []
    add = Gradients.add

    def watched(self: Gradients, part: Any, hidden: Tensor, made: Tensor, factors: Any = None) -> None:
        if factors is not None:
            rows = torch.arange(part.start, part.stop) if part.rows is None else part.rows
            here = made[torch.arange(len(made)), classes[rows]].float() * factors.scale
            found.append((here, factors.at_target))
        add(self, part, hidden, made, factors)

    monkeypatch.setattr(Gradients, "add", watched)
    hidden, weight, classes = draw(target)
    classes[:] = torch.tensor([1] * 4 + [2] * 5 + [3] * 29 + [-100, 1], device=target.device)
    weights = (torch.arange(40, device=target.device) < 39).float()
    kinds = {"workspace": 15 * ROW, "reduction": reduction, "sample_weight": weights}
    _, (_, made) = gradients(target.name, (hidden, weight), classes, **kinds)
    _, (_, right) = gradients("torch", (hidden.double(), weight.double()), classes, **kinds)
    assert ((made - right).norm(dim=1) <= 1e-2 * right.norm(dim=1)).all()
    here, apart = (torch.cat(values) for values in zip(*found, strict=True))
    logits = hidden.double() @ weight.double().t()
    expected = logits.softmax(1)[torch.arange(40), classes.clamp(min=0)] - 1
    expected = expected * (classes >= 0) * weights / (38 if reduction == "mean" else 1)
    rare = (classes == 1)[: len(here)]
    torch.testing.assert_close(apart, expected.float()[: len(here)] * rare)
    torch.testing.assert_close(here, expected.float()[: len(here)] * ~rare, rtol=2**-8, atol=1e-9)


def test_same_bits_each_time(target: Target) -> None:
    hidden, weight, classes = draw(target)
    classes[::2] = 3
    first, *others = (gradients(target.name, (hidden, weight), classes, workspace=9 * ROW)[1] for _ in range(3))
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


def test_same_bits_whichever_row_was_linked_first(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, which shows the order of a sum."""
    hidden, weight, classes = draw(target)
    classes[:] = torch.arange(40, device=target.device) % 11

    def call() -> list[Tensor]:
        with torch.autocast(target.device, torch.bfloat16):
            return gradients(target.name, (hidden.float(), weight.float()), classes, workspace=9 * ROW)[1]

    expected = call()

    def linked(order: Iterable[int]) -> property:
        newest, older = torch.full((67,), -1), torch.full((40,), -1)
        for row in order:
            older[row], newest[classes[row]] = newest[classes[row]].clone(), row
        links = newest.int().to(target.device), older.int().to(target.device)
        return property(lambda _: links)

    for order in (range(40), range(39, -1, -1), torch.randperm(40).tolist()):
        monkeypatch.setattr(exponentials.Exponentials, "_links", linked(order))
        assert all(torch.equal(*pair) for pair in zip(call(), expected, strict=True))


@pytest.mark.parametrize("vocabulary", [72, 67])
def test_first_rows_in_the_memory_of_the_gradient(
    target: Target, vocabulary: int, monkeypatch: pytest.MonkeyPatch, chunks: list[int], launches: list[bool]
) -> None:
    """Whose pieces are exponentials, where their rows can be on boundaries of 16 bytes."""
    monkeypatch.setattr(borrowed, "rows_in_gradient", lambda rows, columns, *_: (min(rows, columns), 32))
    monkeypatch.setattr(schedule, "_STEP_OF_FIRST", 10)
    hidden, weight, classes = draw(target, vocabulary=vocabulary)
    classes[3:9], classes[20:32] = -100, torch.arange(12, device=target.device) % 2 * 60 + 5
    loss, made = gradients(target.name, (hidden, weight), classes, workspace=9 * ROW)
    expected, right = gradients("torch", (hidden.double(), weight.double()), classes)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-3, atol=0)
    for found, exact in zip(made, right, strict=True):
        assert (found.double() - exact).norm() <= 6e-3 * exact.norm()
    assert chunks == [8, 2]
    pieces = 3 * 3 if vocabulary == 72 else 0
    assert launches.count(True) == pieces + 2


@pytest.mark.parametrize("asks", [(True, True), (False, True)], ids=["both", "classifier"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_views_of_hidden_states(
    target: Target, dtype: torch.dtype, reduction: str, asks: tuple[bool, bool], chunks: list[int]
) -> None:
    """Rows off the boundaries of 16 bytes, rows that share memory, columns that are apart; float32 under autocast."""
    hidden, weight, classes = draw(target)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    wide = torch.cat([hidden, hidden, hidden], 1)
    off = torch.cat([wide[0, :1], hidden.flatten()])[1:].view(40, 24)
    for view in (wide[:, 1:25], wide[:, 8:32], wide[:1, :24].expand(40, -1), hidden.t().contiguous().t(), off):
        made = []
        for values in (view, view.contiguous().clone()):
            leaves = values.detach().requires_grad_(asks[0]), weight.detach().requires_grad_()
            with torch.autocast(target.device, torch.bfloat16, enabled=dtype == torch.float32):
                kinds = {"reduction": reduction, "workspace": 15 * ROW, "backend": target.name, "logit_scale": 30.0}
                loss = xent.linear_cross_entropy(*leaves, classes, **kinds)
            sources = [leaf for leaf in leaves if leaf.requires_grad]
            made.append((loss, *torch.autograd.grad(loss, sources, torch.ones_like(loss))))
        assert all(torch.equal(*pair) for pair in zip(*made, strict=True))
    assert chunks == [14, 14, 12] * 10


def test_autocast_rounds_hidden_states_once(target: Target) -> None:
    """What targets add to the classifier's gradient is that of the rounded ones, as the products'."""
    hidden, weight, classes = draw(target)
    hidden = hidden.float() + 1e-3
    found = []
    for values in (hidden, hidden.bfloat16().float()):
        leaf = weight.float().requires_grad_()
        with torch.autocast(target.device, torch.bfloat16):
            loss = xent.linear_cross_entropy(values, leaf, classes, backend=target.name)
        found.append(torch.autograd.grad(loss, leaf)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["vocabulary", "width", "dtype", "pitch", "statistics"])
def test_what_is_not_served(target: Target, kind: str, chunks: list[int]) -> None:
    hidden, weight, classes = draw(target)
    stats = ("predictions",) if kind == "statistics" else ("lse",)
    if kind == "vocabulary":
        weight, classes = weight[: TILE - 1], classes % (TILE - 1)
    elif kind == "width":
        hidden, weight = hidden[:, :20], weight[:, :20].contiguous()
    elif kind == "dtype":
        hidden, weight = hidden.half(), weight.half()
    elif kind == "pitch":
        weight = torch.cat([weight, weight], 1)[:, 4:28]
    leaf = weight.requires_grad_()
    loss, _ = xent.linear_cross_entropy(hidden, leaf, classes, backend=target.name, stats=stats, workspace=9 * ROW)
    loss.backward()
    assert chunks == []
