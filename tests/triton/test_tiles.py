"""A forward pass over tiles of classes finds what the pass over whole rows finds, however they are cut."""

from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target
from xent.backends.torch.facts import Facts
from xent.backends.torch.options import Options, pack_numbers
from xent.backends.torch.results import Results, new_results
from xent.backends.triton.facts import gather_facts
from xent.backends.triton.rows import TritonPass
from xent.backends.triton.tiles import TilePass
from xent.core.spec import STAT_NAMES, LossSpec

INF = float("inf")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "z_loss": {"z_loss": 0.1},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing, all of it": {"label_smoothing": 1.0},
    "weight": {"weight": True},
    "weight, smoothing": {"weight": True, "label_smoothing": 0.2},
    "softcap": {"softcap": 3.0},
    "scale, negative": {"logit_scale": -0.7},
    "scale, nothing": {"logit_scale": 0.0},
    "all": {"weight": True, "label_smoothing": 0.1, "z_loss": 0.02, "softcap": 5.0, "logit_scale": 0.8},
}


def gather(target: Target, classes: Tensor, vocabulary: int, **given: Any) -> Facts:
    given = dict(given)
    weight = None
    if given.pop("weight", False):
        weight = torch.rand(vocabulary)
        weight[: vocabulary // 3] = 0
    spec = LossSpec("none", stats=STAT_NAMES, **given)
    options = Options(
        classes.to(target.device),
        None if weight is None else weight.to(target.device),
        None,
        None,
        pack_numbers(spec, None),
        -100,
        spec.softcap is not None,
        False,
        "none",
        list(STAT_NAMES),
        "triton",
    )
    return gather_facts(options, vocabulary, torch.float32)


def by_rows(facts: Facts, logits: Tensor, at_target: Tensor) -> Results:
    results = new_results(facts, keep_norm=True)
    TritonPass(facts, results).forward(logits, 0, None, at_target)
    return results


def by_tiles(facts: Facts, logits: Tensor, at_target: Tensor, rows: int, width: int) -> Results:
    results = new_results(facts, keep_norm=True)
    run = TilePass(facts, results, at_target)
    for start in range(0, len(logits), rows):
        for first in range(0, logits.shape[1], width):
            run.add(logits[start : start + rows, first : first + width].contiguous(), start, first)
    run.finish()
    return results


def compare(found: Results, expected: Results) -> None:
    for name in ("loss", "norm", "lse", "nll", "entropy", "z_term"):
        one, other = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(
            one, other, rtol=3e-6, atol=3e-6, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert torch.equal(found.predictions, expected.predictions)


def draw(target: Target, rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return logits and classes, of which some are ignored."""
    torch.manual_seed(0)
    logits, classes = 3 * torch.randn(rows, vocabulary), torch.randint(vocabulary, (rows,))
    classes[1::4] = -100
    return logits.to(target.device), classes


def targets_of(logits: Tensor, facts: Facts) -> Tensor:
    assert facts.target is not None
    return logits.gather(1, facts.target[:, None])[:, 0].contiguous()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("rows", "width"), [(4, 67), (4, 5), (3, 16), (2, 50), (1, 66)])
def test_every_option_and_statistic(target: Target, name: str, rows: int, width: int) -> None:
    logits, classes = draw(target, 4, 67)
    facts = gather(target, classes, 67, **OPTIONS[name])
    at_target = targets_of(logits, facts)
    compare(by_tiles(facts, logits, at_target, rows, width), by_rows(facts, logits, at_target))


@pytest.mark.parametrize("width", [4096, 4097, 10_000])
def test_tiles_wider_than_a_block(target: Target, width: int) -> None:
    logits, classes = draw(target, 3, 10_000)
    facts = gather(target, classes, 10_000, label_smoothing=0.1)
    at_target = targets_of(logits, facts)
    compare(by_tiles(facts, logits, at_target, 3, width), by_rows(facts, logits, at_target))


@pytest.mark.parametrize("name", ["plain", "softcap", "weight, smoothing", "scale, negative"])
@pytest.mark.parametrize("masked", [1, 16, 17, 22])
@pytest.mark.parametrize("width", [16, 67])
def test_leading_columns_of_minus_infinity(target: Target, name: str, masked: int, width: int) -> None:
    """The masked columns fill no tile, one, or more; with class weights they weigh nothing."""
    logits, classes = draw(target, 4, 67)
    logits[:, :masked] = INF if name == "scale, negative" else -INF
    classes = torch.where(classes < 0, classes, classes.clamp(min=masked))
    classes[0] = 66
    facts = gather(target, classes, 67, **OPTIONS[name])
    at_target = targets_of(logits, facts)
    expected = by_rows(facts, logits, at_target)
    assert expected.loss.isfinite().all()
    compare(by_tiles(facts, logits, at_target, 4, width), expected)


@pytest.mark.parametrize("width", [16, 67])
def test_impossible_classes_with_a_share_cost_infinitely_much(target: Target, width: int) -> None:
    logits, classes = draw(target, 4, 67)
    logits[:, :20] = -INF
    facts = gather(target, classes.clamp(min=20), 67, label_smoothing=0.1)
    at_target = targets_of(logits, facts)
    expected = by_rows(facts, logits, at_target)
    assert (expected.loss == INF).all()
    compare(by_tiles(facts, logits, at_target, 4, width), expected)


@pytest.mark.parametrize("width", [16, 67])
def test_target_alone_is_possible(target: Target, width: int) -> None:
    logits, _ = draw(target, 3, 67)
    classes = torch.tensor([0, 40, 66])
    logits[torch.arange(67, device=target.device) != classes.to(target.device)[:, None]] = -INF
    facts = gather(target, classes, 67)
    at_target = targets_of(logits, facts)
    found = by_tiles(facts, logits, at_target, 3, width)
    compare(found, by_rows(facts, logits, at_target))
    assert (found.nll == 0).all()
    assert (found.entropy == 0).all()


@pytest.mark.parametrize("width", [5, 67])
def test_ties_go_to_the_lowest_class(target: Target, width: int) -> None:
    logits, classes = draw(target, 4, 67)
    logits[:, [3, 4, 20, 66]] = 50.0
    facts = gather(target, classes, 67)
    assert (by_tiles(facts, logits, targets_of(logits, facts), 4, width).predictions == 3).all()


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workspace", [None, 1, 100, 67 * 4 * 3, 10**9])
def test_workspace_makes_no_difference(target: Target, name: str, dtype: torch.dtype, workspace: int | None) -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, device=target.device).to(dtype) for rows in (3, 67))
    classes = torch.randint(67, (3,), device=target.device)
    options = dict(OPTIONS[name])
    if options.pop("weight", False):
        options["weight"] = torch.rand(67, device=target.device)
    found, stats = xent.linear_cross_entropy(
        hidden, weight, classes, workspace=workspace, stats=STAT_NAMES, backend=target.name, **options
    )
    expected, expected_stats = xent.linear_cross_entropy(
        hidden, weight, classes, stats=STAT_NAMES, backend="torch", **options
    )
    close = 3e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, rtol=close, atol=close)
    for field in STAT_NAMES:
        torch.testing.assert_close(getattr(stats, field), getattr(expected_stats, field), rtol=close, atol=close)
