"""Rows of one block and several, off boundaries of memory, hard ones, and upstream gradients, against float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.covering import crossed, dealt
from tests.targets import Target
from tests.triton.judged import (
    ASKED,
    CLOSE,
    DTYPES,
    OPTIONS,
    Rows,
    Upstream,
    compare,
    compare_results,
    draw,
    padded,
)  # fmt: skip
from xent.core.spec import ROW_STATS

INF, NAN = float("inf"), float("nan")
SIZES = [1, 2, 7, 8, 9, 16, 17, 31, 67, 1001, 1023, 1024, 1025, 4096, 4097, 8192, 8200, 12_289]
"""Around multiples of a vector and of a block."""


@pytest.mark.parametrize(*crossed(vocabulary=SIZES, dtype=DTYPES, options=OPTIONS, asked=ASKED))
def test_sizes(target: Target, vocabulary: int, dtype: torch.dtype, options: str, asked: str) -> None:
    compare(draw(target, vocabulary, dtype, options, asked))


@pytest.mark.parametrize(
    *crossed(start=[0, 3], vocabulary=[33, 4104, 8201], dtype=DTYPES[:2], options=OPTIONS, asked=["loss", "all"])
)
def test_rows_off_boundaries(
    target: Target, start: int, vocabulary: int, dtype: torch.dtype, options: str, asked: str
) -> None:
    rows = draw(target, vocabulary, dtype, options, asked)
    compare(replace(rows, logits=padded(rows.logits, start)))


KINDS: dict[str, Callable[[Tensor, int], Any]] = {
    "sure": lambda row, y: row[y].fill_(40),
    "surest": lambda row, y: row[y].fill_(3e4),
    "hopeless": lambda row, y: row[y].fill_(-3e4),
    "first block far below": lambda row, y: row[:8].fill_(-3e4),
    "first block far above": lambda row, y: row[:8].add_(300),
    "last block far above": lambda row, y: row[-8:].add_(300),
    "all far above": lambda row, y: row.add_(2000),
    "all far below": lambda row, y: row.sub_(2000),
    "all the same": lambda row, y: row.fill_(-3e4),
    "first block impossible": lambda row, y: row[:8].fill_(-INF),
    "last block impossible": lambda row, y: row[-8:].fill_(-INF),
    "first blocks impossible, others far below": lambda row, y: [row.sub_(2000), row[:16].fill_(-INF)],
    "target impossible": lambda row, y: row[y].fill_(-INF),
    "target alone possible": lambda row, y: [row[:y].fill_(-INF), row[y + 1 :].fill_(-INF)],
    "all impossible": lambda row, y: row.fill_(-INF),
    "one infinite": lambda row, y: row[y - 1].fill_(INF),
    "target infinite": lambda row, y: row[y].fill_(INF),
    "one NaN": lambda row, y: row[y - 1].fill_(NAN),
    "target NaN": lambda row, y: row[y].fill_(NAN),
    "huge": lambda row, y: row.mul_(1e30 if row.dtype != torch.float16 else 1e4),
}


SURE = (
    "sure", "surest", "hopeless", "first block far below", "first block far above", "last block far above",
    "all far above", "all far below", "all the same", "first block impossible", "target alone possible",
)  # fmt: skip


PLACES = [(31, 3), (31, 12), (8200, 20), (8201, 8200), (12_288, 5000)]
"""(classes, target): the target in the first, a middle and the last block."""


@pytest.mark.parametrize(*dealt(2, place=PLACES, dtype=DTYPES, asked=["loss", "gradients of statistics", "statistics"]))
def test_hard_rows(target: Target, place: tuple[int, int], dtype: torch.dtype, asked: str) -> None:
    """Each row must not affect the others."""
    vocabulary, y = place
    kinds = SURE if asked == "gradients of statistics" else tuple(KINDS)
    logits = 2 * torch.randn(len(kinds), vocabulary, generator=torch.Generator().manual_seed(y))
    logits = padded(logits.to(target.device, dtype))
    for row, kind in zip(logits, kinds, strict=True):
        KINDS[kind](row, y)
    classes = torch.full((len(kinds),), y, device=target.device)
    upstream = torch.linspace(-1, 2, 4 * len(kinds), device=target.device).view(4, -1)
    if asked == "loss":
        rows = Rows(logits, classes, upstream=Upstream(torch.linspace(-1, 2, len(kinds), device=target.device)))
        smallest = 2.0**-24 if dtype == torch.float16 else 1e-30
        compare(rows, 1e-30, rtol=max(CLOSE[dtype], 1e-5), atol=smallest)
    elif asked == "statistics":
        named = ("lse", "nll", "entropy", "predictions")
        compare_results(Rows(logits, classes, options={"label_smoothing": 0.1}, stats=named))
    else:
        rows = Rows(logits, classes, stats=ROW_STATS, upstream=Upstream(*upstream))
        compare(rows, rtol=4e-6 if dtype == torch.float32 else 2.0**-8, atol=2e-6)


@pytest.mark.parametrize(
    *dealt(
        dtype=DTYPES,
        options=[{}, {"logit_scale": -0.7}, {"label_smoothing": 0.1}, {"z_loss": 0.1}],
        vocabulary=[2048, 2051],
    )
)
def test_loss_and_gradient_with_a_softcap(
    target: Target, dtype: torch.dtype, options: dict[str, float], vocabulary: int
) -> None:
    """The gradient's rounding averages out: what is left over all classes is the error of a factor."""
    rows = draw(target, vocabulary, dtype, asked="loss")
    rows = replace(rows, target=rows.target.where(rows.target >= 0, 7), options={"softcap": 5.0} | options)
    exact = rows.exact().gradients()
    for way, (gradient, made) in rows.gradients().items():
        truth, right = exact[way]
        torch.testing.assert_close(made["loss"].cpu().double(), right["loss"], rtol=1e-5, atol=1e-5)
        others = truth.scatter(1, rows.target.cpu()[:, None], 0)
        assert abs(float((gradient.cpu().double() * others).sum() / others.square().sum()) - 1) < 2e-4


@pytest.mark.parametrize(*dealt(dtype=DTYPES, logit_scale=[1.0, -0.5]))
def test_masked_classes_have_no_gradient_with_a_softcap(target: Target, dtype: torch.dtype, logit_scale: float) -> None:
    rows = draw(target, 2048, dtype, asked="loss")
    rows.logits[:, 100:300] = -INF
    rows.logits[:, 500:600] = -1e4
    for softcap in (1.0, 30.0):
        made = replace(rows, options={"softcap": softcap, "logit_scale": logit_scale}).gradients()
        for gradient, results in made.values():
            assert bool(results["loss"].isfinite().all())
            assert bool((gradient[0] != 0).any())
            # With a negative scale, s z is +inf: the reciprocal of the exponential is at least 2e-38.
            for masked in (gradient[:, 100:300], gradient[:, 500:600]):
                assert masked.abs().max() <= (0 if logit_scale > 0 else 1e-36)


@pytest.mark.parametrize("upstream", [1.0, 0.3])
@pytest.mark.parametrize("sizes", [(50, 3), (3, 500), (0, 7), (7, 0)], ids=str)
def test_gradients_of_both_factors_are_scaled(target: Target, sizes: tuple[int, int], upstream: float) -> None:
    rows, width = sizes
    leaves = [torch.randn(size, device=target.device).requires_grad_() for size in ((rows, width), (90, width))]
    classes = torch.zeros(rows, dtype=torch.int64, device=target.device)
    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    loss = xent.linear_cross_entropy(*leaves, classes, reduction="sum", backend=target.name)
    plain = torch.nn.functional.cross_entropy(wide[0] @ wide[1].t(), classes.cpu(), reduction="sum")
    made = torch.autograd.grad(loss, leaves, torch.full_like(loss, upstream))
    for one, other in zip(made, torch.autograd.grad(upstream * plain, wide), strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=1e-5)


UPSTREAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it comes": lambda rows: rows,
    "expanded": lambda rows: rows[:1, :1].expand(rows.shape),
    "expanded over rows": lambda rows: rows[:1].expand(rows.shape),
    "transposed": lambda rows: rows.t().contiguous().t(),
    "every other": lambda rows: rows.repeat_interleave(2, -1)[:, ::2],
}


@pytest.mark.parametrize(*dealt(layout=UPSTREAMS, name=Upstream._fields))
def test_upstream_gradients_of_any_layout(target: Target, layout: str, name: str) -> None:
    torch.manual_seed(0)
    logits, classes = torch.randn(2, 7, 33, device=target.device), torch.arange(14, device=target.device).view(2, 7)
    upstream = UPSTREAMS[layout](torch.randn(2, 7, device=target.device))
    compare(Rows(logits, classes, upstream=Upstream(**{name: upstream})))


@pytest.mark.parametrize(*dealt(vocabulary=[67, 1001, 8201], dtype=DTYPES))
def test_a_negative_scale_of_negative_logits(target: Target, vocabulary: int, dtype: torch.dtype) -> None:
    """The products are the same, and so are all bits of the results: a row's reference follows its largest product.

    Rows of a multiple of 16 bytes are read twice with a negative scale, and may round differently.
    """
    torch.manual_seed(0)
    logits = (3 * torch.randn(4, vocabulary, device=target.device)).to(dtype)
    classes = torch.randint(vocabulary, (4,), device=target.device)

    def results(sign: int) -> list[Tensor]:
        log_probs, entropy, stats = xent.log_probs(
            *(sign * logits, classes), logit_scale=sign * 0.7, entropy=True, stats=("lse",), backend=target.name
        )
        return [log_probs, entropy, stats.lse]

    assert all(map(torch.equal, results(1), results(-1)))


@pytest.mark.parametrize("gap", [10.0, 25.0, 60.0])
def test_entropy_of_a_sure_row_keeps_its_digits(target: Target, gap: float) -> None:
    """The entropy is of the order of e^-gap if the target is far above all other logits and the first block."""
    logits = torch.zeros(1, 9000)
    logits[0, 8500] = gap
    rows = Rows(logits.to(target.device), torch.tensor([8500], device=target.device), stats=("entropy",),
                upstream=Upstream(entropy=torch.ones(1, device=target.device)))  # fmt: skip
    entropy, gradient = (one.cpu().double() for one in (rows.forward()["entropy"], rows.gradients()["beside"][0]))
    others = 8999 * torch.tensor(-gap, dtype=torch.float64).exp()
    expected = others.log1p() + gap * others / (1 + others)
    torch.testing.assert_close(entropy[0], expected, rtol=1e-5, atol=0)
    p = 1 / (1 + others)
    torch.testing.assert_close(gradient[0, 8500], -p * (expected - others.log1p()), rtol=2e-5, atol=0)
