"""A forward pass over tiles of classes has the same results as over whole rows, for any tile size."""

from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options
from xent.backends.triton import tiles
from xent.backends.triton.job import TritonJob
from xent.backends.triton.linear_launches import launch_finish
from xent.backends.triton.tiles import fold
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


class Given(Linear):
    """A linear call that returns given logits instead of computing them."""

    def write_logits(self, hidden: Tensor, out: Tensor, classes: slice = slice(None)) -> None:
        out.copy_(hidden[:, classes])


def gather(target: Target, classes: Tensor, vocabulary: int, **given: Any) -> Options:
    given = dict(given)
    weight = None
    if given.pop("weight", False):
        weight = torch.rand(vocabulary)
        weight[: vocabulary // 3] = 0
        weight = weight.to(target.device)
    spec = LossSpec("none", stats=STAT_NAMES, **given)
    return Options(classes.to(target.device), weight, None, None, None, None, None, None, None, spec, "triton")


def by_rows(options: Options, logits: Tensor) -> dict[str, Any]:
    job = TritonJob(options, logits.shape[1], torch.float32, 0, None, False)
    job.logits(logits, None, None)
    return results(job)


def by_tiles(options: Options, logits: Tensor, rows: int, width: int) -> dict[str, Any]:
    job = TritonJob(options, logits.shape[1], torch.float32, 0, None, False)
    classes = options.target.clamp(min=0).int()
    given = Given(logits, logits.new_empty(logits.shape[1], 1), None, 0, None, torch.float32, (False,) * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "tile_shape", lambda *_: (rows, width))
        sums = fold(given, job.facts, classes)
    launch_finish(job.facts, job.results, sums, logits.gather(1, classes[:, None].long())[:, 0].contiguous(), None)
    return results(job)


def results(job: TritonJob) -> dict[str, Any]:
    loss, stats = job.finish()
    return {"loss": loss} | dict(zip(job.spec.stats, stats, strict=True))


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=3e-6, atol=3e-6, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def draw(target: Target, rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return logits and classes, some of them ignored."""
    torch.manual_seed(0)
    logits, classes = 3 * torch.randn(rows, vocabulary), torch.randint(vocabulary, (rows,))
    classes[1::4] = -100
    return logits.to(target.device), classes


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("rows", "width"), [(4, 67), (4, 5), (3, 16), (2, 50), (1, 66)])
def test_every_option_and_statistic(target: Target, name: str, rows: int, width: int) -> None:
    logits, classes = draw(target, 4, 67)
    options = gather(target, classes, 67, **OPTIONS[name])
    compare(by_tiles(options, logits, rows, width), by_rows(options, logits))


@pytest.mark.parametrize("width", [4096, 4097, 10_000])
def test_tiles_wider_than_a_block(target: Target, width: int) -> None:
    logits, classes = draw(target, 3, 10_000)
    options = gather(target, classes, 10_000, label_smoothing=0.1)
    compare(by_tiles(options, logits, 3, width), by_rows(options, logits))


@pytest.mark.parametrize("name", ["plain", "softcap", "weight, smoothing", "scale, negative"])
@pytest.mark.parametrize("masked", [1, 16, 17, 22])
@pytest.mark.parametrize("width", [16, 67])
def test_leading_columns_of_minus_infinity(target: Target, name: str, masked: int, width: int) -> None:
    """The masked columns fill no tile, one tile, or more. With class weights, their weights are 0."""
    logits, classes = draw(target, 4, 67)
    logits[:, :masked] = INF if name == "scale, negative" else -INF
    classes = torch.where(classes < 0, classes, classes.clamp(min=masked))
    classes[0] = 66
    options = gather(target, classes, 67, **OPTIONS[name])
    expected = by_rows(options, logits)
    assert expected["loss"].isfinite().all()
    compare(by_tiles(options, logits, 4, width), expected)


@pytest.mark.parametrize("width", [16, 67])
def test_impossible_classes_with_a_share_have_infinite_loss(target: Target, width: int) -> None:
    logits, classes = draw(target, 4, 67)
    logits[:, :20] = -INF
    options = gather(target, classes.clamp(min=20), 67, label_smoothing=0.1)
    expected = by_rows(options, logits)
    assert (expected["loss"] == INF).all()
    compare(by_tiles(options, logits, 4, width), expected)


@pytest.mark.parametrize("width", [16, 67])
def test_only_the_target_is_possible(target: Target, width: int) -> None:
    logits, _ = draw(target, 3, 67)
    classes = torch.tensor([0, 40, 66])
    logits[torch.arange(67, device=target.device) != classes.to(target.device)[:, None]] = -INF
    options = gather(target, classes, 67)
    found = by_tiles(options, logits, 3, width)
    compare(found, by_rows(options, logits))
    assert (found["nll"] == 0).all()
    assert (found["entropy"] == 0).all()


@pytest.mark.parametrize("width", [5, 67])
def test_ties_go_to_the_lowest_class(target: Target, width: int) -> None:
    logits, classes = draw(target, 4, 67)
    logits[:, [3, 4, 20, 66]] = 50.0
    options = gather(target, classes.clamp(min=0), 67)
    assert (by_tiles(options, logits, 4, width)["predictions"] == 3).all()


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
