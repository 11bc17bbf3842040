"""A forward pass over tiles of classes has the same results as over whole rows, for any tile size."""

from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target
from xent.core.spec import STAT_NAMES

INF = float("inf")
OPTIONS = {
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


def gather(target: Target, vocabulary: int, **given: Any) -> dict[str, Any]:
    """Return the options; a third of the class weights are 0."""
    given = dict(given)
    if given.pop("weight", False):
        weight = torch.rand(vocabulary, generator=torch.Generator().manual_seed(1))
        weight[: vocabulary // 3] = 0
        given["weight"] = weight.to(target.device)
    return given | {"reduction": "none", "stats": STAT_NAMES, "backend": target.name}


def by_rows(options: dict[str, Any], logits: Tensor, classes: Tensor) -> dict[str, Any]:
    return results(xent.cross_entropy(logits, classes, **options))


def by_tiles(options: dict[str, Any], logits: Tensor, classes: Tensor, rows: int, width: int) -> dict[str, Any]:
    """Compute the same from hidden states without a gradient: the classifier is an identity, infinite logits a bias."""
    infinite = logits.isinf()
    bias = torch.where(infinite.any(0), logits.amax(0) if bool((logits == INF).any()) else logits.amin(0), 0.0)
    assert torch.equal(infinite, infinite[:1].expand_as(infinite))
    eye = torch.eye(logits.shape[1], device=logits.device)
    hidden = logits.masked_fill(infinite, 0)
    more = {"linear_bias": bias} if bool(infinite.any()) else {}
    return results(xent.linear_cross_entropy(hidden, eye, classes, workspace=rows * width * 4, **more, **options))


def results(made: Any) -> dict[str, Any]:
    return {"loss": made[0]} | {name: getattr(made[1], name) for name in STAT_NAMES}


def compare(found: dict[str, Any], expected: dict[str, Any], close: float = 3e-6) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=close, atol=close, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def draw(target: Target, rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return logits and classes, some of them ignored."""
    torch.manual_seed(0)
    logits, classes = 3 * torch.randn(rows, vocabulary), torch.randint(vocabulary, (rows,))
    classes[1::4] = -100
    return logits.to(target.device), classes.to(target.device)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("rows", "width"), [(4, 67), (4, 5), (3, 16), (2, 50), (1, 66)])
def test_every_option_and_statistic(target: Target, name: str, rows: int, width: int) -> None:
    logits, classes = draw(target, 4, 67)
    options = gather(target, 67, **OPTIONS[name])
    compare(by_tiles(options, logits, classes, rows, width), by_rows(options, logits, classes))


@pytest.mark.parametrize("width", [2048, 4096, 10_000])
def test_tiles_of_several_blocks(target: Target, width: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 8, device=target.device), torch.randn(10_000, 8, device=target.device)
    classes = torch.randint(10_000, (3,), device=target.device)
    options = gather(target, 10_000, label_smoothing=0.1)
    found = results(xent.linear_cross_entropy(hidden, weight, classes, workspace=3 * width * 4, **options))
    compare(found, by_rows(options, hidden @ weight.t(), classes), close=2e-5)


@pytest.mark.parametrize("name", ["plain", "softcap", "weight, smoothing", "scale, negative"])
@pytest.mark.parametrize("masked", [1, 16, 17, 22])
@pytest.mark.parametrize("width", [16, 67])
def test_leading_columns_of_minus_infinity(target: Target, name: str, masked: int, width: int) -> None:
    """The masked columns fill no tile, one tile, or more. With class weights, their weights are 0."""
    logits, classes = draw(target, 4, 67)
    logits[:, :masked] = INF if name == "scale, negative" else -INF
    classes = torch.where(classes < 0, classes, classes.clamp(min=masked))
    classes[0] = 66
    options = gather(target, 67, **OPTIONS[name])
    expected = by_rows(options, logits, classes)
    assert expected["loss"].isfinite().all()
    compare(by_tiles(options, logits, classes, 4, width), expected)


@pytest.mark.parametrize("width", [16, 67])
def test_impossible_classes_with_a_share_have_infinite_loss(target: Target, width: int) -> None:
    logits, classes = draw(target, 4, 67)
    logits[:, :20] = -INF
    classes = classes.clamp(min=20)
    options = gather(target, 67, label_smoothing=0.1)
    expected = by_rows(options, logits, classes)
    assert (expected["loss"] == INF).all()
    compare(by_tiles(options, logits, classes, 4, width), expected)


@pytest.mark.parametrize("width", [16, 67])
def test_only_the_target_is_possible(target: Target, width: int) -> None:
    logits, _ = draw(target, 3, 67)
    classes = torch.tensor([0, 40, 66], device=target.device)
    logits[torch.arange(67, device=target.device) != classes[:, None]] = -1e4
    options = gather(target, 67)
    found = by_tiles(options, logits, classes, 3, width)
    compare(found, by_rows(options, logits, classes))
    assert (found["nll"] == 0).all()
    assert (found["entropy"] == 0).all()


@pytest.mark.parametrize("width", [5, 67])
def test_ties_go_to_the_lowest_class(target: Target, width: int) -> None:
    logits, classes = draw(target, 4, 67)
    logits[:, [3, 4, 20, 66]] = 50.0
    classes, options = classes.clamp(min=0), gather(target, 67)
    assert (by_tiles(options, logits, classes, 4, width)["predictions"] == 3).all()
