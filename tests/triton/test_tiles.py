"""A forward pass over tiles of classes has the results of whole rows, also if a tile is impossible.

tests/test_stats.py has every option, with tiles of several shapes.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.covering import dealt
from tests.targets import Target
from xent.backends.torch.products import Classifier
from xent.core.spec import STAT_NAMES

INF = float("inf")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "weight, smoothing": {"label_smoothing": 0.2, "weight": (torch.arange(67) > 21).float()},
    "scale, negative": {"logit_scale": -0.7},
    "smoothing": {"label_smoothing": 0.1},
}


def compared(target: Target, logits: Tensor, classes: Tensor, width: int, name: str = "plain") -> dict[str, Tensor]:
    """Return the results of tiles of `width` classes, which are those of whole rows.

    The logits are hidden states without a gradient, with an identity as classifier; infinite logits are a bias.
    """
    options = OPTIONS[name] | {"reduction": "none", "stats": STAT_NAMES, "backend": target.name}
    options |= {"weight": options["weight"].to(target.device)} if "weight" in options else {}
    infinite, eye = logits[0].isinf(), torch.eye(67, device=target.device)
    bias = logits[0].where(infinite, 0.0)
    hidden, workspace = logits.masked_fill(infinite, 0), len(logits) * width * 4
    results = [
        xent.linear_cross_entropy(hidden, eye, classes, linear_bias=bias, workspace=workspace, **options),
        xent.cross_entropy(logits, classes, **options),
    ]
    found, expected = ({"loss": loss} | {one: getattr(stats, one) for one in STAT_NAMES} for loss, stats in results)
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=3e-6, equal_nan=True)
    return found


def draw(target: Target) -> tuple[Tensor, Tensor]:
    """Return logits and classes from 22 on; one is ignored."""
    generator = torch.Generator().manual_seed(0)
    logits, classes = 3 * torch.randn(4, 67, generator=generator), torch.randint(22, 67, (4,), generator=generator)
    classes[0], classes[1] = 66, -100
    return logits.to(target.device), classes.to(target.device)


@pytest.mark.parametrize("width", [2048, 4096, 10_000])
def test_tiles_of_several_blocks(target: Target, width: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 8, device=target.device), torch.randn(10_000, 8, device=target.device)
    classes = torch.randint(10_000, (3,), device=target.device)
    options = {"label_smoothing": 0.1, "reduction": "none", "stats": STAT_NAMES, "backend": target.name}
    (found, stats), (loss, expected) = (
        xent.linear_cross_entropy(hidden, weight, classes, workspace=3 * width * 4, **options),
        xent.cross_entropy(hidden @ weight.t(), classes, **options),
    )
    torch.testing.assert_close([found, *vars(stats).values()], [loss, *vars(expected).values()], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(*dealt(name=list(OPTIONS)[:4], masked=[1, 16, 17, 22], width=[16, 67]))
def test_leading_columns_of_minus_infinity(target: Target, name: str, masked: int, width: int) -> None:
    """They fill no tile, one tile, or more. With class weights, their weights are 0."""
    logits, classes = draw(target)
    logits[:, :masked] = INF if name == "scale, negative" else -INF
    assert compared(target, logits, classes, width, name)["loss"].isfinite().all()


@pytest.mark.parametrize("width", [16, 67])
def test_impossible_classes_with_a_share_have_infinite_loss(target: Target, width: int) -> None:
    logits, classes = draw(target)
    logits[:, :20] = -INF
    assert (compared(target, logits, classes.clamp(min=22), width, "smoothing")["loss"] == INF).all()


@pytest.mark.parametrize("width", [16, 67])
def test_only_the_target_is_possible(target: Target, width: int) -> None:
    logits, _ = draw(target)
    classes = torch.tensor([0, 40, 66, 5], device=target.device)
    logits[torch.arange(67, device=target.device) != classes[:, None]] = -1e4
    found = compared(target, logits, classes, width)
    assert not found["nll"].any()
    assert not found["entropy"].any()


@pytest.mark.parametrize("width", [5, 67])
def test_ties_go_to_the_lowest_class(target: Target, width: int) -> None:
    logits, classes = draw(target)
    logits[:, [3, 4, 20, 66]] = 50.0
    assert (compared(target, logits, classes.clamp(min=0), width)["predictions"] == 3).all()


def test_ranks_store_the_logits_of_a_workspace(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted in whole rows, so that no tiles serve them: then all rows would be stored at one time."""
    sizes, write = [], Classifier.write_logits

    def watched(self: Classifier, hidden: Tensor, out: Tensor, classes: slice | None = None) -> None:
        sizes.append(out.nbytes)
        write(self, hidden, out, classes)

    monkeypatch.setattr(Classifier, "write_logits", watched)
    hidden, weight = torch.randn(64, 8, device=target.device), torch.randn(128, 8, device=target.device)
    classes, workspace = torch.zeros(64, dtype=torch.int64, device=target.device), 16 * 128 * 4
    xent.linear_log_probs(hidden, weight, classes, stats=("rank",), workspace=workspace, backend=target.name)
    assert 0 < max(sizes) <= workspace
