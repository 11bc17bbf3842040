"""Statistics of rows, their upstream gradients, and temperatures per row, against float64."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import xent
from tests.covering import crossed
from tests.targets import Target
from tests.triton.judged import ASKED, DTYPES, Rows, Upstream, compare, draw, padded
from xent.core.spec import ROW_STATS

INF = float("inf")
UPSTREAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it comes": lambda rows: rows,
    "expanded": lambda rows: rows[:1, :1].expand(rows.shape),
    "expanded over rows": lambda rows: rows[:1].expand(rows.shape),
    "transposed": lambda rows: rows.t().contiguous().t(),
    "every other": lambda rows: rows.repeat_interleave(2, -1)[:, ::2],
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "two axes": lambda t: t.flatten(0, 1),
    "one row": lambda t: t[1, 2],
    "one row of a matrix": lambda t: t.flatten(0, 1)[4:5],
    "axes of one": lambda t: t[1:2, 2:3],
    "all but the last token": lambda t: t[:, :-1],
    "all but the first token": lambda t: t[:, 1:],
    "last token": lambda t: t[:, -1:],
    "every other token": lambda t: t[:, ::2],
    "leading axes swapped": lambda t: t.transpose(0, 1),
    "fewer classes": lambda t: t[..., :-3],
    "later classes": lambda t: t[..., 3:],
    "expanded": lambda t: t[:1].expand(5, -1, -1),
    "expanded tokens": lambda t: t[:, :1].expand(-1, 5, -1),
    "a token of a wide batch": lambda t: t.view(1, 3, 4, -1)[:, :, 1],
    "four axes": lambda t: t.view(3, 2, 2, -1)[:, :, :1],
    "groups of groups": lambda t: t.view(3, 2, 2, -1)[:, :1, :1],
    "classes first": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
}


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
    compare(Rows(logits, classes, upstream=Upstream(**{name: upstream})))


@pytest.mark.parametrize(*crossed(masked=[1, 8, 20, 4096, 5000], vocabulary=[33, 8200], dtype=DTYPES, asked=ASKED))
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 8.0])
def test_one_temperature_equals_the_same_temperature_per_row(
    target: Target, dtype: torch.dtype, softcap: float | None
) -> None:
    """The results are bitwise equal if the quotients are exact."""
    rows = draw(target, 1001, dtype, "plain")
    options = {"softcap": softcap, "entropy": True, "stats": ("lse",), "backend": target.name}
    found = []
    for temperature in (0.5, torch.full((5,), 0.5, device=target.device)):
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


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_nan_in_any_block_of_a_row_is_predicted(target: Target, dtype: torch.dtype) -> None:
    classes = [0, 5000, 12345, 20002]
    logits = torch.randn(4, 20003, generator=torch.Generator().manual_seed(0))
    logits[range(4), classes] = float("nan")
    logits[0, 19000] = float("nan")
    logits, ids = logits.to(target.device, dtype), torch.zeros(4, dtype=torch.int64, device=target.device)
    _, stats = xent.cross_entropy(logits, ids, stats=("predictions",), backend=target.name)
    assert stats.predictions is not None
    assert stats.predictions.tolist() == classes
