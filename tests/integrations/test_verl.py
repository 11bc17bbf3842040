"""The replacements of verl's function and module have the results that its tests define."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.integrations.models import device
from xent.integrations.verl import FusedLinearForPPO, linear_cross_entropy


def inputs() -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 5, 16, generator=generator), torch.randn(33, 16, generator=generator)
    labels = torch.randint(33, (2, 5), generator=generator)
    return hidden.to(device).requires_grad_(), weight.to(device).requires_grad_(), labels.to(device)


def definition(hidden: Any, weight: Any, labels: Any, temperature: float, reduction: str) -> tuple[Any, Any]:
    """Return the definition in verl's tests, for flattened tokens, in float64."""
    log_p = (F.linear(hidden.double(), weight.double()) / temperature).flatten(0, -2).log_softmax(-1)
    nll = F.nll_loss(log_p, labels.flatten(), reduction=reduction)
    return -nll, -(log_p.exp() * log_p).sum(-1)


def compare(ours: Any, truth: Any, leaves: Any) -> None:
    """Compare log-probabilities, entropies and their gradients."""
    assert [each.dtype for each in ours] == [torch.float32] * 2
    torch.testing.assert_close(list(ours), list(truth), rtol=1e-5, atol=1e-5, check_dtype=False)
    upstream = [torch.randn_like(each) for each in ours]
    found = torch.autograd.grad(ours, leaves, upstream)
    expected = torch.autograd.grad(truth, leaves, [each.to(truth[0].dtype) for each in upstream])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_equals_the_definition(reduction: str) -> None:
    given = inputs()
    compare(linear_cross_entropy(*given, 0.7, reduction, None), definition(*given, 0.7, reduction), given[:2])


def test_defaults() -> None:
    given = inputs()
    torch.testing.assert_close(linear_cross_entropy(*given), linear_cross_entropy(*given, None, None))
    torch.testing.assert_close(linear_cross_entropy(*given)[0], linear_cross_entropy(*given, 1.0, "NONE")[0])
    flat = given[0].flatten(0, 1), given[1], given[2].flatten()
    torch.testing.assert_close(linear_cross_entropy(*given), linear_cross_entropy(*flat))


def test_bad_reduction() -> None:
    with pytest.raises(ValueError, match="reduction must be one of 'none', 'sum', 'mean' or None, got 'max'"):
        linear_cross_entropy(*inputs(), 1.0, "max")


def test_group_of_one_process(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        group, given = dist.group.WORLD, inputs()
        torch.testing.assert_close(linear_cross_entropy(*given, 1.0, "none", group), linear_cross_entropy(*given))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("flat", [False, True])
def test_module_equals_the_definition(flat: bool) -> None:
    hidden, weight, tokens = inputs()
    given = (hidden.flatten(0, 1), weight, tokens.flatten()) if flat else (hidden, weight, tokens)
    ours = FusedLinearForPPO(chunk_size=512, impl_backend="liger").forward(
        hidden_states=given[0], vocab_weights=given[1], input_ids=given[2].to(torch.int32), temperature=0.7
    )
    truth = [each.view(given[2].shape) for each in definition(*given, 0.7, "none")]
    compare(ours, truth, (hidden, weight))
