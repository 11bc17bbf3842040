"""Where nobody can tell the host which rows are computed, as in a CUDA graph: all are, and hidden states may be NaN."""

from typing import Any

import pytest
import torch

import xent
from tests.targets import Target
from xent.backends.torch import schedule

CALLS: list[tuple[dict[str, Any], bool, int]] = [
    ({}, False, 1),
    ({"stats": ("lse",)}, True, 4),
    ({"label_smoothing": 0.1, "softcap": 5.0}, True, 1),
]
"""Options, whether there is a bias, and how many chunks."""


@pytest.mark.parametrize(("options", "bias", "chunks"), CALLS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("copied", [False, True])
def test_ignored_hidden_states_reach_nothing(
    target: Target,
    options: dict[str, Any],
    reduction: str,
    bias: bool,
    chunks: int,
    copied: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`copied`: by autocast, so that the driver may write to them."""
    torch.manual_seed(0)
    dtype = torch.float32 if copied else torch.bfloat16
    hidden, weight = (torch.randn(size, 8, device=target.device).to(dtype).requires_grad_() for size in (20, 67))
    classes = torch.randint(67, (20,), device=target.device)
    classes[3:9], weights = -100, torch.ones(20, device=target.device)
    weights[11] = 0
    leaves = [hidden, weight]
    kinds = {**options, "reduction": reduction, "sample_weight": weights, "backend": target.name}
    if bias:
        leaves.append(torch.randn(67, device=target.device).to(dtype).requires_grad_())
        kinds["linear_bias"] = leaves[2]

    def gradients() -> list[torch.Tensor]:
        with torch.autocast(target.device, torch.bfloat16, enabled=copied):
            made = xent.linear_cross_entropy(hidden, weight, classes, workspace=20 // chunks * 67 * 2, **kinds)
        loss = made[0] if isinstance(made, tuple) else made
        return [loss.detach(), *torch.autograd.grad(loss, leaves, torch.ones_like(loss))]

    expected = gradients()
    monkeypatch.setattr(schedule, "_host_sees", lambda tensor: False)
    with torch.no_grad():
        hidden[3:9], hidden[11] = torch.nan, torch.inf
    kept = hidden.detach().clone()
    for found, right in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found.float(), right.float(), rtol=2.0**-6, atol=2.0**-6 * float(right.abs().max()))
    assert torch.equal(hidden.nan_to_num(7), kept.nan_to_num(7))
