"""The kernel for targets that are class probabilities, with one block and several, against float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.cases import EVERYWHERE
from tests.covering import crossed
from tests.options import OPTIONS
from tests.targets import Target
from tests.triton.judged import Rows, Upstream, compare
from xent.command.check.case import Case
from xent.core.spec import DIFFERENTIABLE

INF = float("inf")
STATS = ("lse", "nll", "entropy", "predictions", "z_loss", "accuracy", "count")


def draw(target: Target, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(4, vocabulary, generator=generator)
    given = torch.rand(4, vocabulary, generator=generator) ** 8
    given /= given.sum(-1, keepdim=True)
    return logits.to(target.device), given.to(target.device)


def results(logits: Tensor, given: Tensor, backend: str) -> dict[str, Tensor]:
    leaf = logits.detach().requires_grad_()
    loss, stats = xent.cross_entropy(leaf, given, reduction="none", stats=STATS, backend=backend)
    upstream = torch.linspace(-1, 2, loss.numel(), device=leaf.device).view(loss.shape)
    found = {name: getattr(stats, name) for name in STATS}
    return found | {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, leaf, upstream)[0]}


@pytest.mark.parametrize(
    *crossed(
        name=[name for name in OPTIONS if name.startswith("probabilities")],
        dtype=EVERYWHERE,
        vocabulary=[2, 33, 1500],
        stats=[(), DIFFERENTIABLE],
    )
)
def test_sizes(target: Target, name: str, dtype: str, vocabulary: int, stats: tuple[str, ...]) -> None:
    target.judge(Case("cross_entropy", (4,), vocabulary, dtype, name, OPTIONS[name], "none", stats=stats))


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
    logits, given = draw(target, vocabulary)
    before = results(logits, given, target.name)
    KINDS[kind](logits[2], given[2])
    upstream = Upstream(torch.linspace(-1, 2, 4, device=target.device))
    compare(Rows(logits, given, stats=STATS, upstream=upstream), rtol=5e-6, atol=1e-6)
    found = results(logits, given, target.name)
    others = torch.tensor([0, 1, 3], device=target.device)
    for name in ("loss", "gradient", "lse", "nll", "entropy"):
        assert torch.equal(found[name][others], before[name][others])


def test_equal_probabilities_count_as_the_lowest_class(target: Target) -> None:
    logits = torch.zeros(2, 1500, device=target.device)
    given = torch.zeros(2, 1500, device=target.device)
    given[:, [3, 1200]] = 0.5
    logits[0, 3], logits[1, 1200] = 1, 1
    _, stats = xent.cross_entropy(logits, given, stats=("accuracy", "predictions"), backend=target.name)
    assert stats.predictions.tolist() == [3, 1200]
    assert float(stats.accuracy) == 0.5
