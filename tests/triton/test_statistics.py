"""Statistics of rows, their upstream gradients, and temperatures per row, against float64."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import xent
from tests.covering import crossed
from tests.targets import Target
from tests.triton.judged import DTYPES, Rows, Upstream, compare, compare_results
from tests.triton.test_rows import KINDS, LAYOUTS, padded
from xent.core.spec import ROW_STATS

INF = float("inf")
UPSTREAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it comes": lambda rows: rows,
    "expanded": lambda rows: rows[:1, :1].expand(rows.shape),
    "expanded over rows": lambda rows: rows[:1].expand(rows.shape),
    "transposed": lambda rows: rows.t().contiguous().t(),
    "every other": lambda rows: rows.repeat_interleave(2, -1)[:, ::2],
}
ROWS = 5
ASKED: dict[str, tuple[str, ...]] = {
    "all": ("loss", "lse", "nll", "entropy"),
    "log-probabilities and entropy": ("loss", "entropy"),
    "entropy": ("entropy",),
    "lse": ("lse",),
    "loss and nll": ("loss", "nll"),
}
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": True},
    "softcap, scale, temperature": {"softcap": 4.0, "logit_scale": -0.7, "temperature": True},
    "weight, smoothing, z_loss": {"weight": True, "label_smoothing": 0.2, "z_loss": 0.1},
    "sample_weight, softcap": {"sample_weight": True, "softcap": 30.0},
    "all": {
        "weight": True, "label_smoothing": 0.1, "z_loss": 0.02, "softcap": 5.0, "logit_scale": 0.8,
        "sample_weight": True,
    },
}  # fmt: skip


def draw(
    target: Target, vocabulary: int, dtype: torch.dtype, options: str = "plain", asked: str = "all", rows: int = ROWS
) -> Rows:
    """Return rows, one of them ignored; with weights, one of them has weight 0."""
    generator = torch.Generator().manual_seed(vocabulary)
    given = dict(OPTIONS[options])
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    classes = torch.randint(vocabulary, (rows,), generator=generator)
    classes[0], classes[-1], classes[2] = 0, vocabulary - 1, -100
    weight, sample, temperature = (
        torch.rand(size, generator=generator) * wide + least
        for size, wide, least in ((vocabulary, 2, 0), (rows, 1, 0.5), (rows, 2, 0.4))
    )
    weight[::7], sample[1] = 0, 0
    upstream = torch.randn(4, rows, generator=generator).to(target.device)
    return Rows(
        padded(logits.to(target.device, dtype)),
        classes.to(target.device),
        weight.to(target.device) if given.pop("weight", False) else None,
        sample.to(target.device) if given.pop("sample_weight", False) else None,
        temperature.to(target.device) if given.pop("temperature", False) else None,
        options=given,
        stats=ROW_STATS,
        upstream=Upstream(
            *(one if name in ASKED[asked] else None for name, one in zip(Upstream._fields, upstream, strict=True))
        ),
    )


@pytest.mark.parametrize(
    *crossed(
        vocabulary=[1, 7, 8, 17, 31, 67, 1001, 1024, 4099, 8200, 12_289],
        dtype=DTYPES,
        options=list(OPTIONS),
        asked=list(ASKED),
    )
)
def test_sizes(target: Target, vocabulary: int, dtype: torch.dtype, options: str, asked: str) -> None:
    compare(draw(target, vocabulary, dtype, options, asked))


@pytest.mark.parametrize(*crossed(start=[0, 3], vocabulary=[33, 4104, 8201], dtype=DTYPES[:2], options=list(OPTIONS)))
def test_rows_off_boundaries(target: Target, start: int, vocabulary: int, dtype: torch.dtype, options: str) -> None:
    rows = draw(target, vocabulary, dtype, options)
    compare(replace(rows, logits=padded(rows.logits, start)))


@pytest.mark.parametrize(
    *crossed(
        layout=LAYOUTS, dtype=DTYPES[:2], vocabulary=[40, 37], start=[0, 3], stats=[(), ROW_STATS], hot=[False, True]
    )
)
def test_layouts(
    target: Target, layout: str, dtype: torch.dtype, vocabulary: int, start: int, stats: tuple[str, ...], hot: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = 3 * torch.randn(12, vocabulary, generator=generator)
    logits = LAYOUTS[layout](padded(values.to(target.device, dtype), start).view(3, 4, vocabulary))
    shape = logits.shape[:-1]
    classes = torch.arange(shape.numel()).view(shape) % logits.shape[-1]
    temperature = torch.rand(shape, generator=generator) + 0.5
    upstream = torch.randn(4, *shape, generator=generator).to(target.device)
    rows = Rows(
        logits, classes.to(target.device), temperature=temperature.to(target.device) if hot else None, stats=stats,
        upstream=Upstream(*upstream[: 4 if stats else 1]),
    )  # fmt: skip
    compare(rows)


@pytest.mark.parametrize("layout", UPSTREAMS)
@pytest.mark.parametrize("name", Upstream._fields)
def test_upstream_gradients_of_any_layout(target: Target, layout: str, name: str) -> None:
    torch.manual_seed(0)
    logits, classes = torch.randn(2, 7, 33, device=target.device), torch.arange(14, device=target.device).view(2, 7)
    upstream = UPSTREAMS[layout](torch.randn(2, 7, device=target.device))
    rows = Rows(logits, classes, upstream=Upstream(**{name: upstream}))
    compare(replace(rows, upstream=Upstream(**{name: upstream})))


@pytest.mark.parametrize(
    *crossed(masked=[1, 8, 20, 4096, 5000], vocabulary=[33, 8200], dtype=DTYPES, asked=list(ASKED))
)
def test_columns_of_minus_infinity(
    target: Target, masked: int, vocabulary: int, dtype: torch.dtype, asked: str
) -> None:
    """Leading columns, one in between, and the last column; also with other logits far below 0."""
    masked = min(masked, vocabulary - 12)
    rows = draw(target, vocabulary, dtype, asked=asked)
    for shift in (0, -30, -3000):
        rows.logits.add_(shift)
        rows.logits[:, :masked], rows.logits[:, masked + 5], rows.logits[:, -1] = -INF, -INF, -INF
        classes = torch.where(rows.target < 0, rows.target, rows.target.clamp(masked + 1, masked + 4))
        compare(replace(rows, target=classes))


SURE = (
    "sure", "surest", "hopeless", "first block far below", "first block far above", "last block far above",
    "all far above", "all far below", "all the same", "first block impossible", "target alone possible",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocabulary", "y"), [(31, 12), (8200, 20), (8200, 8195)])
@pytest.mark.parametrize("kinds", [SURE, tuple(KINDS)], ids=["sure", "all"])
def test_hard_rows(target: Target, dtype: torch.dtype, vocabulary: int, y: int, kinds: tuple[str, ...]) -> None:
    logits = 2 * torch.randn(len(kinds), vocabulary, generator=torch.Generator().manual_seed(y))
    logits = padded(logits.to(target.device, dtype))
    for row, kind in zip(logits, kinds, strict=True):
        KINDS[kind](row, y)
    classes = torch.full((len(kinds),), y, device=target.device)
    upstream = torch.linspace(-1, 2, 4 * len(kinds), device=target.device).view(4, -1)
    rows = Rows(logits, classes, stats=ROW_STATS, upstream=Upstream(*upstream))
    if kinds is not SURE:
        named = ("lse", "nll", "entropy", "predictions")
        compare_results(replace(rows, options={"label_smoothing": 0.1}, stats=named))
        return
    compare(rows, rtol=max(4e-6, 2.0**-8 if dtype != torch.float32 else 0), atol=2e-6)


def entropies(rows: Rows) -> tuple[Tensor, Tensor]:
    return rows.forward()["entropy"].cpu().double(), rows.gradients()["beside"].cpu().double()


@pytest.mark.parametrize("gap", [10.0, 25.0, 60.0])
def test_entropy_of_a_sure_row_keeps_its_digits(target: Target, gap: float) -> None:
    """The entropy is of the order of e^-gap if the target is far above all other logits and the first block."""
    logits = torch.zeros(1, 9000)
    logits[0, 8500] = gap
    rows = Rows(logits.to(target.device), torch.tensor([8500], device=target.device), stats=("entropy",),
                upstream=Upstream(entropy=torch.ones(1, device=target.device)))  # fmt: skip
    entropy, gradient = entropies(rows)
    others = 8999 * torch.tensor(-gap, dtype=torch.float64).exp()
    expected = others.log1p() + gap * others / (1 + others)
    torch.testing.assert_close(entropy[0], expected, rtol=1e-5, atol=0)
    p = 1 / (1 + others)
    torch.testing.assert_close(gradient[0, 8500], -p * (expected - others.log1p()), rtol=2e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 8.0])
def test_one_temperature_equals_the_same_temperature_per_row(
    target: Target, dtype: torch.dtype, softcap: float | None
) -> None:
    """The results are bitwise equal if the quotients are exact."""
    rows = draw(target, 1001, dtype, "plain")
    options = {"softcap": softcap, "entropy": True, "stats": ("lse",), "backend": target.name}
    found = []
    for temperature in (0.5, torch.full((ROWS,), 0.5, device=target.device)):
        log_p, entropy, stats = xent.log_probs(rows.logits, rows.target, temperature=temperature, **options)
        found.append((log_p, entropy, stats.lse))
    close = {"rtol": 0, "atol": 0} if softcap is None else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(*found, **close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1000, 1001, 4099, 8200])
def test_bits_are_the_same_with_and_without_entropy_and_gradient(
    target: Target, vocabulary: int, dtype: torch.dtype
) -> None:
    for options in ("plain", "temperature", "softcap, scale, temperature"):
        rows = draw(target, vocabulary, dtype, options)
        leaf = rows.logits.detach().requires_grad_()
        each = [replace(rows, stats=stats) for stats in ((), ("entropy",), ("lse", "entropy"))]
        found = [one.run(logits)["loss"].detach() for one in each for logits in (rows.logits, leaf)]
        for one in found[1:]:
            assert torch.equal(one, found[0])
