"""Targets outside [0, V) on a GPU, in `linear_cross_entropy` and its statistics: NaN in their rows and nowhere else."""

import pytest
import torch

import xent
from xent.core.spec import STAT_NAMES

ROWS, HIDDEN, VOCABULARY = 300, 16, 1000
WRONG = {3: VOCABULARY, 77: -1, 150: 10**9, 151: -7, 299: -(2**40)}

pytestmark = pytest.mark.usefixtures("poisoned")


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, device="cuda", requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, device="cuda", requires_grad=True)
    right = torch.randint(VOCABULARY, (ROWS,), device="cuda")
    right[::4] = -100
    wrong = right.clone()
    for row, value in WRONG.items():
        wrong[row] = value
    return hidden, weight, right, wrong


@pytest.mark.parametrize("workspace", [None, 100 * VOCABULARY * 4])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_row_is_nan_and_others_are_not(workspace: int | None, reduction: str) -> None:
    hidden, weight, _, wrong = drawn()
    options = {"workspace": workspace, "reduction": reduction, "backend": "triton"}
    loss = xent.linear_cross_entropy(hidden, weight, wrong, **options)
    assert bool(loss.isnan().any())
    if reduction == "none":
        assert loss.isnan().nonzero()[:, 0].tolist() == sorted(WRONG)
    grad, grad_weight = torch.autograd.grad(loss, (hidden, weight), torch.ones_like(loss))
    assert grad.isnan().any(-1).nonzero()[:, 0].tolist() == sorted(WRONG)
    assert bool(grad_weight.isnan().any())


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_gradients_of_other_rows_are_unchanged(reduction: str) -> None:
    hidden, weight, right, wrong = drawn()
    grads = []
    for target in (right, wrong):
        loss = xent.linear_cross_entropy(hidden, weight, target, reduction=reduction, backend="triton")
        grads.append(torch.autograd.grad(loss, hidden, torch.ones_like(loss))[0])
    others = torch.ones(ROWS, dtype=torch.bool, device="cuda")
    others[list(WRONG)] = False
    assert torch.equal(grads[0][others], grads[1][others])


@pytest.mark.parametrize("linear", [False, True])
def test_statistics(linear: bool) -> None:
    hidden, weight, _, wrong = drawn()
    options = {"reduction": "none", "stats": STAT_NAMES, "backend": "triton"}
    with torch.no_grad():
        if linear:
            loss, stats = xent.linear_cross_entropy(hidden, weight, wrong, **options)
        else:
            loss, stats = xent.cross_entropy(hidden @ weight.t(), wrong, **options)
    assert loss.isnan().nonzero()[:, 0].tolist() == sorted(WRONG)
    assert stats.nll.isnan().nonzero()[:, 0].tolist() == sorted(WRONG)
    assert bool(stats.lse.isfinite().all())
    assert bool(stats.entropy.isfinite().all())


@pytest.mark.parametrize("linear", [False, True])
def test_checking_values_is_opt_in(linear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, wrong = drawn()
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    function = xent.linear_cross_entropy if linear else xent.cross_entropy
    sources = (hidden, weight) if linear else (hidden @ weight.t(),)
    with pytest.raises(IndexError, match=r"target\[3\] is 1000; classes are 0 to 999"):
        function(*sources, wrong, backend="triton")


@pytest.mark.parametrize("stats", [(), ("lse", "nll", "entropy")])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows_of_logits_are_nan(stats: tuple[str, ...], reduction: str) -> None:
    hidden, weight, _, wrong = drawn()
    leaf = (hidden @ weight.t()).detach().requires_grad_()
    made = xent.cross_entropy(leaf, wrong, reduction=reduction, stats=stats, backend="triton")
    loss = made[0] if stats else made
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    assert grad.isnan().any(-1).nonzero()[:, 0].tolist() == sorted(WRONG)
    assert reduction == "mean" or loss.isnan().nonzero()[:, 0].tolist() == sorted(WRONG)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_rows_with_an_invalid_temperature_are_nan(value: float) -> None:
    hidden, weight, right, _ = drawn()
    heat = torch.ones(ROWS, device="cuda")
    heat[[5, 77]] = value
    leaf = (hidden @ weight.t()).detach().requires_grad_()
    log_p, entropy = xent.log_probs(leaf, right, temperature=heat, entropy=True, backend="triton")
    (grad,) = torch.autograd.grad(log_p.sum() + entropy.sum(), leaf)
    for found in (log_p.isnan(), entropy.isnan(), grad.isnan().any(-1)):
        assert found.nonzero()[:, 0].tolist() == [5, 77]
