"""The kernel for targets that are class probabilities, with one block and several, against float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.covering import crossed
from tests.targets import Target
from tests.triton.judged import Rows, Upstream, compare

INF = float("inf")
CLOSE = {torch.float32: 5e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
STATS = ("lse", "nll", "entropy", "predictions", "z_loss", "accuracy", "count")
OPTIONS = {
    "plain": {},
    "smoothing, weight": {"label_smoothing": 0.1, "weight": True},
    "sample_weight, z_loss": {"sample_weight": True, "z_loss": 0.1},
    "softcap, scale": {"softcap": 4.0, "logit_scale": -0.7, "label_smoothing": 0.2},
}


def draw(target: Target, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(4, vocabulary, generator=generator)
    given = torch.rand(4, vocabulary, generator=generator) ** 8
    given /= given.sum(-1, keepdim=True)
    return logits.to(target.device, dtype), given.to(target.device)


def results(logits: Tensor, given: Tensor, backend: str) -> dict[str, Tensor]:
    leaf = logits.detach().requires_grad_()
    loss, stats = xent.cross_entropy(leaf, given, reduction="none", stats=STATS, backend=backend)
    upstream = torch.linspace(-1, 2, loss.numel(), device=leaf.device).view(loss.shape)
    found = {name: getattr(stats, name) for name in STATS}
    return found | {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, leaf, upstream)[0]}


@pytest.mark.parametrize(*crossed(name=OPTIONS, dtype=[torch.float32, torch.float16], vocabulary=[1, 33, 1500]))
def test_sizes(target: Target, name: str, dtype: torch.dtype, vocabulary: int) -> None:
    logits, given = draw(target, vocabulary, dtype)
    options, arrays = dict(OPTIONS[name]), {}
    if options.pop("weight", False):
        arrays["weight"] = torch.linspace(0, 2, vocabulary, device=target.device)
    if options.pop("sample_weight", False):
        arrays["sample_weight"] = torch.tensor([1.0, 0.0, 0.5, 2.0], device=target.device)
    for stats in ((), STATS):
        judge(logits, given, stats, **arrays, options=options)


def judge(logits: Tensor, given: Tensor, stats: tuple[str, ...], **more: Any) -> None:
    upstream = Upstream(torch.linspace(-1, 2, 4, device=logits.device))
    rows = Rows(logits, given, stats=stats, upstream=upstream, **more)
    compare(rows, rtol=CLOSE[logits.dtype], atol=2.0**-24 if logits.dtype == torch.float16 else 1e-6)


KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sure": lambda z, q: [z[5].fill_(60), q.fill_(0), q[5].fill_(1)],
    "far above": lambda z, q: z.add_(3000),
    "impossible, with no share": lambda z, q: [z[:8].fill_(-INF), q[:8].fill_(0)],
    "impossible, with a share": lambda z, q: z[:8].fill_(-INF),
    "all impossible": lambda z, q: z.fill_(-INF),
    "one NaN": lambda z, q: z[7].fill_(torch.nan),
    "no probability at all": lambda z, q: q.fill_(0),
    "probabilities that are no distribution": lambda z, q: q.mul_(3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [33, 1500])
def test_hard_rows(target: Target, kind: str, vocabulary: int) -> None:
    """In one row. The other rows must be unchanged."""
    logits, given = draw(target, vocabulary, torch.float32)
    before = results(logits, given, target.name)
    KINDS[kind](logits[2], given[2])
    judge(logits, given, STATS)
    found = results(logits, given, target.name)
    others = torch.tensor([0, 1, 3], device=target.device)
    for name in ("loss", "gradient", "lse", "nll", "entropy"):
        assert torch.equal(found[name][others], before[name][others])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "classes first": lambda t: t.t().contiguous().t(),
    "padded": lambda t: torch.nn.functional.pad(t, (3, 2), value=torch.nan)[:, 3:-2],
    "every other class": lambda t: t.repeat_interleave(2, -1)[:, ::2],
    "bfloat16": lambda t: t.bfloat16(),
    "float64": lambda t: t.double(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_probabilities_of_any_layout(target: Target, layout: str) -> None:
    logits, given = draw(target, 33, torch.float32)
    given = given.bfloat16().float()
    one, other = (results(logits, q, target.name) for q in (LAYOUTS[layout](given), given))
    for name, value in other.items():
        assert torch.equal(one[name], value), name


def test_rows_in_groups_of_groups(target: Target) -> None:
    """Probabilities are copied if a launch cannot address them, and logits are processed in blocks of rows."""
    torch.manual_seed(0)
    wide = [torch.rand(2, 4, 3, 33, device=target.device) for _ in range(2)]
    cut = [tensor[:, :3, :2] for tensor in wide]
    for logits, given in ((cut[0], cut[1]), (cut[0].contiguous(), cut[1]), (cut[0], cut[1].contiguous())):
        found = results(logits, given, target.name)
        expected = results(cut[0].contiguous(), cut[1].contiguous(), target.name)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_equal_probabilities_count_as_the_lowest_class(target: Target) -> None:
    logits = torch.zeros(2, 1500, device=target.device)
    given = torch.zeros(2, 1500, device=target.device)
    given[:, [3, 1200]] = 0.5
    logits[0, 3], logits[1, 1200] = 1, 1
    _, stats = xent.cross_entropy(logits, given, stats=("accuracy", "predictions"), backend=target.name)
    assert stats.predictions.tolist() == [3, 1200]
    assert float(stats.accuracy) == 0.5
