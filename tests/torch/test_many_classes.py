"""Rows of many classes on a CPU: named options, logits far from the first ones, and exponentials near 0."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import xent
from tests.cases import DTYPES, FUNCTIONS, LOG_PROBS, covering_cases, paired_cases
from tests.targets import Target
from xent.command.check.case import Case

TORCH = Target("torch", "cpu")
CLASSES, ROWS, FIRST = 5000, 17, 1024
CASES = [case for function in FUNCTIONS for dtype in DTYPES for case in covering_cases(function, dtype)[::4]]
PAIRS = [case for function in (*FUNCTIONS, *LOG_PROBS) for case in paired_cases(function, DTYPES)[::2]]


@pytest.mark.parametrize("case", CASES + PAIRS, ids=str)
def test_loss_and_gradients(case: Case) -> None:
    many = replace(case, rows=(3, 5), vocabulary=CLASSES + 3)
    TORCH.judge(many)


def rows_of_all_kinds() -> Tensor:
    """Rows whose first logits are far from the largest one, or are not numbers; all targets are class 3000."""
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(ROWS, CLASSES, generator=generator)
    x[1] += 50
    x[2] -= 100
    x[3] += 1000
    x[4, 4000] = 90
    x[5, 4000] = 300
    x[6, 3000] = 25
    x[7, :FIRST] = -torch.inf
    x[8, FIRST:] = -torch.inf
    x[8, 3000] = -70
    x[9, :FIRST] = -60
    x[10, :FIRST] = 60
    x[11, :FIRST] = -1e4
    x[12, 3000] = -torch.inf
    x[13, 3000] = 33
    x[13, :FIRST] = -40
    x[14, 100:2000] = -1e4
    x[15] *= 1e-30
    x[16, :FIRST] = -33.2  # x - R of the largest logit is wrong by 1.5e-6 in float32
    x[16, FIRST:] -= 45
    x[16, 3000], x[16, 4000] = -1.1, -3.14
    return x


def exact_nll(x: Tensor, target: int) -> Tensor:
    """Return -log p of a class, from sums of more bits than float64 has: `log_softmax` rounds them."""
    wide = x.double().numpy().astype(np.longdouble)
    finite = np.isfinite(wide[:, target])
    others = np.delete(wide - np.where(finite, wide[:, target], 0)[:, None], target, 1)
    largest = np.maximum(others.max(1), 0)
    total = np.exp(others - largest[:, None]).sum(1)
    found = np.where(largest > 0, largest + np.log(total + np.exp(-largest)), np.log1p(total))
    return torch.from_numpy(np.where(finite, found, np.inf).astype(np.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("inplace", [False, True])
def test_rows_of_all_kinds(dtype: torch.dtype, reduction: str, inplace: bool) -> None:
    x = rows_of_all_kinds().to(dtype)
    target = torch.full((ROWS,), 3000)
    truth = x.double().log_softmax(-1)
    truth[:, 3000] = -exact_nll(x, 3000)
    expected = truth.exp()
    expected[:, 3000] = torch.expm1(truth[:, 3000])
    leaf = x.clone().requires_grad_()
    loss, stats = xent.cross_entropy(
        leaf * 1, target, reduction=reduction, inplace=inplace, stats=("lse", "nll", "entropy"), backend="torch"
    )
    loss.sum().backward()
    assert leaf.grad is not None
    assert stats.nll is not None
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    torch.testing.assert_close(stats.nll.double(), -truth[:, 3000], rtol=4 * eps, atol=4 * eps)
    assert bool((stats.nll >= 0).all())
    torch.testing.assert_close(stats.lse.double(), x.double().logsumexp(-1), rtol=4 * eps, atol=4 * eps)
    entropy = -(truth.exp() * truth.clamp(min=-1000)).sum(-1)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=20 * eps, atol=4 * eps)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(leaf.grad.double(), expected, rtol=20 * eps, atol=5 * eps)
    assert bool((leaf.grad[x == -torch.inf][:100] == 0).all())


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("stats", [(), ("entropy",), ("predictions", "log_sum_sq_probs", "mean_logit")])
def test_loss_of_a_row_has_the_same_bits_alone_and_without_statistics(stats: tuple[str, ...]) -> None:
    """PyTorch splits the sum of a single row of 40,000 elements or more among threads."""
    x = 3 * torch.randn(2 * ROWS, 133_000, generator=torch.Generator().manual_seed(1))
    x[:ROWS, :CLASSES] = rows_of_all_kinds()
    x[ROWS:, 3000] = 17  # with a probability near 1/2, the loss shows the rounding of the sum
    target = torch.full((2 * ROWS,), 3000)
    together = xent.cross_entropy(x, target, reduction="none", backend="torch")
    options = {"stats": stats} if stats else {}
    for row in range(2 * ROWS):
        for leaf in (x[row : row + 1], x[row : row + 1].clone().requires_grad_()):
            found = xent.cross_entropy(leaf, target[:1], reduction="none", backend="torch", **options)
            assert (found[0] if stats else found).detach().equal(together[row : row + 1])


def test_loss_of_certain_targets_is_not_negative() -> None:
    x = torch.full((200, CLASSES), -200.0)
    x[:, :FIRST] = -20
    x[:, 3000] = torch.linspace(5, 40, 200)
    leaf = x.requires_grad_()
    loss = xent.cross_entropy(leaf, torch.full((200,), 3000), reduction="none", backend="torch")
    assert bool((loss >= 0).all())
    assert bool((loss <= 3e-7).all())


@pytest.mark.parametrize("stats", [(), ("nll",)])
@pytest.mark.parametrize("size", [1, 8])  # logits near 120 are too far from the reference
def test_linear_loss_of_16_bits(stats: tuple[str, ...], size: int) -> None:
    """Logits are 16-bit, but for the targets'; with "nll" they are float32."""
    torch.manual_seed(0)
    hidden, classifier = size * torch.randn(40, 16).bfloat16(), torch.randn(CLASSES, 16).bfloat16()
    target = (hidden @ classifier.T).argmax(-1) if size > 1 else torch.randint(CLASSES, (40,))
    logits = (hidden.double() @ classifier.double().T) if stats else (hidden @ classifier.T).double()
    logits[torch.arange(40), target] = (hidden.double() * classifier[target].double()).sum(-1)
    exact = -logits.log_softmax(-1)[torch.arange(40), target]
    found = xent.linear_cross_entropy(hidden, classifier, target, reduction="none", stats=stats, backend="torch")
    loss = found[0] if stats else found
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("low", [-torch.inf, -1e4, -800.0, -95.0])
def test_exponentials_of_low_logits(dtype: torch.dtype, low: float) -> None:
    """Rows in which most exponentials are 0 or subnormal, in several calls and blocks."""
    x = torch.randn(70, 4200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    masked = x.clone()
    masked[:, 500:] = low
    target = torch.arange(70)
    for values in (masked, masked, x, masked):
        leaf = values.clone().requires_grad_()
        loss = xent.cross_entropy(leaf, target, reduction="sum", backend="torch")
        loss.backward()
        truth = values.double().log_softmax(-1)
        expected = truth.exp()
        expected[target, target] -= 1
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(loss.double(), -truth[target, target].sum(), rtol=1e-6, atol=0)
        torch.testing.assert_close(leaf.grad.double(), expected, rtol=20 * eps, atol=5 * eps + 2e-38)
