"""Rows without a gradient: nothing in them reaches a result, in one chunk or several, whatever number is ignored."""

from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target
from xent.backends.torch import products, sources

ROWS, WIDTH, V = 8, 8, 72
CALLS: list[tuple[dict[str, Any], bool, int]] = [
    ({}, False, 1),
    ({"stats": ("lse", "predictions", "accuracy", "z_loss")}, True, 4),
    ({"label_smoothing": 0.1, "softcap": 5.0}, True, 1),
    ({}, True, 4),
]
"""(options, whether there is a bias, number of chunks)"""


def draw(target: Target, dtype: torch.dtype, bias: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return (hidden states, classifier and optional bias), classes with some ignored, and row weights with a 0."""
    torch.manual_seed(0)
    sizes = [(ROWS, WIDTH), (V, WIDTH)] + [(V,)] * bias
    leaves = [torch.randn(size, device=target.device).to(dtype).requires_grad_() for size in sizes]
    classes, weights = torch.randint(V, (ROWS,), device=target.device), torch.ones(ROWS, device=target.device)
    classes[2:5], weights[6] = -100, 0
    return leaves, classes, weights


def results(
    backend: str, leaves: list[Tensor], classes: Tensor, chunks: int, copied: bool = False, **options: Any
) -> list[Tensor]:
    """Return the loss, the statistics and the gradients."""
    with torch.autocast(classes.device.type, torch.bfloat16, enabled=copied):
        size = 2 if copied else leaves[0].itemsize
        bias = leaves[2] if len(leaves) > 2 else None
        workspace = -(-ROWS // chunks) * V * size
        made = xent.linear_cross_entropy(
            *leaves[:2], classes, linear_bias=bias, workspace=workspace, backend=backend, **options
        )
    loss, stats = made if isinstance(made, tuple) else (made, None)
    reported = [getattr(stats, name) for name in options.get("stats", ())]
    return [loss.detach(), *reported, *torch.autograd.grad(loss, leaves, torch.ones_like(loss))]


@pytest.mark.parametrize(("options", "bias", "chunks"), CALLS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("copied", [False, True])
def test_hidden_states_of_ignored_rows_have_no_effect(
    target: Target, options: dict[str, Any], reduction: str, bias: bool, chunks: int, copied: bool
) -> None:
    """`copied`: autocast copies the hidden states, so that the driver may overwrite them."""
    leaves, classes, weights = draw(target, torch.float32 if copied else torch.bfloat16, bias)
    kinds = {"chunks": chunks, "copied": copied, "reduction": reduction, "sample_weight": weights, **options}
    expected = results(target.name, leaves, classes, **kinds)
    hidden = leaves[0]
    with torch.no_grad():
        hidden[2:5] = torch.nan
        if not options.get("stats"):  # rows with weight 0 have statistics
            hidden[6] = torch.inf
    kept = hidden.detach().clone()
    assert all(map(torch.equal, results(target.name, leaves, classes, **kinds), expected))
    assert torch.equal(hidden.nan_to_num(7), kept.nan_to_num(7))


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_hidden_states_of_ignored_rows_have_no_effect_through_padding(
    target: Target, trained: tuple[int, ...], reduction: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits on CUDA have more columns than classes, for alignment. `trained`: hidden states, classifier, bias."""
    for module in (sources, products):
        monkeypatch.setattr(module, "padded_columns", lambda classes, device: -(-classes // 64) * 64)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, WIDTH, device=target.device) for rows in (ROWS, 11))
    arrays, classes = (hidden, weight, torch.randn(11, device=target.device)), torch.arange(ROWS, device=target.device)
    classes[2:5] = -100
    options = {"reduction": reduction, "workspace": -(-ROWS // chunks) * 64 * 4, "backend": target.name}
    results_of_values = []
    for value in (1.0, torch.nan):
        hidden[2:5] = value
        leaves = [array.clone().requires_grad_(index in trained) for index, array in enumerate(arrays)]
        loss = xent.linear_cross_entropy(*leaves[:2], classes, linear_bias=leaves[2], **options)
        gradients = torch.autograd.grad(loss, [leaves[index] for index in trained], torch.ones_like(loss))
        results_of_values.append([loss.detach(), *gradients])
    torch.testing.assert_close(*results_of_values, rtol=0, atol=0)


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("options", "bias", "chunks"), CALLS, ids=str)
def test_any_number_of_ignored_rows(
    target: Target, options: dict[str, Any], bias: bool, chunks: int, reduction: str, ignored: str
) -> None:
    leaves, classes, weights = draw(target, torch.float32, bias)
    if ignored == "all":
        classes[:] = -100
    elif ignored == "none":
        classes, weights = classes.clamp(min=0), torch.ones_like(weights)
    kinds = {"chunks": chunks, "reduction": reduction, **options}
    found = results(target.name, leaves, classes, sample_weight=weights, **kinds)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = results("torch", wide, classes, sample_weight=weights.double(), **(kinds | {"chunks": 1}))
    for one, right in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), right.double(), rtol=1e-5, atol=2e-6)
