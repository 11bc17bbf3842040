"""The gradient of class probabilities in PyTorch, beyond what the matrix covers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import xent
from tests.targets import Target

REDUCTIONS = ["mean", "sum", "none"]


@pytest.fixture
def tensors(target: Target) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = {
        "logits": torch.randn(2, 6, 11, generator=generator),
        "input": torch.randn(2, 6, 8, generator=generator),
        "linear_weight": torch.randn(11, 8, generator=generator),
        "target": torch.softmax(torch.randn(2, 6, 11, generator=generator), -1),
    }
    return {name: tensor.to(target.device).requires_grad_() for name, tensor in drawn.items()}


def sources_of(tensors: dict[str, Tensor], function: str) -> dict[str, Any]:
    names = ("logits",) if function == "cross_entropy" else ("input", "linear_weight")
    return {name: tensors[name] for name in names}


def plain(sources: dict[str, Tensor], probabilities: Tensor, reduction: str = "mean") -> Tensor:
    logits = sources.get("logits")
    if logits is None:
        logits = F.linear(sources["input"], sources["linear_weight"])
    made = F.cross_entropy(logits.flatten(0, -2), probabilities.flatten(0, -2), reduction=reduction)
    return made.view(probabilities.shape[:-1]) if reduction == "none" else made


@pytest.mark.parametrize("layout", ["axis 1", "transposed", "expanded"])
def test_layouts(target: Target, tensors: dict[str, Tensor], layout: str) -> None:
    logits, probabilities = tensors["logits"].detach(), tensors["target"].detach()
    if layout == "expanded":
        probabilities = probabilities[:, :1].expand(2, 6, 11)
    axis, copied = 1 if layout == "axis 1" else -1, probabilities.clone().requires_grad_()
    given = {
        "axis 1": probabilities.movedim(-1, 1).contiguous(),
        "transposed": probabilities.transpose(0, 1).contiguous().transpose(0, 1),
        "expanded": probabilities,
    }[layout].requires_grad_()
    upstream = torch.rand(2, 6, device=target.device)
    loss = xent.cross_entropy(logits.movedim(-1, axis), given, axis=axis, reduction="none", backend=target.name)
    (found,) = torch.autograd.grad(loss, given, upstream)
    (wanted,) = torch.autograd.grad(plain({"logits": logits}, copied, "none"), copied, upstream)
    torch.testing.assert_close(found.movedim(axis, -1), wanted)


def test_rows_with_weight_0_have_no_gradient(target: Target, tensors: dict[str, Tensor]) -> None:
    logits, weight = tensors["logits"].detach().clone(), torch.ones(2, 6, device=target.device)
    logits[0, 1], weight[0, 1] = torch.nan, 0.0
    loss = xent.cross_entropy(logits, tensors["target"], sample_weight=weight, backend=target.name)
    (found,) = torch.autograd.grad(loss, tensors["target"])
    assert found.isfinite().all()
    assert not found[0, 1].any()
    none = xent.cross_entropy(logits, tensors["target"], sample_weight=weight * 0, backend=target.name)
    assert not torch.autograd.grad(none, tensors["target"])[0].any()


@pytest.mark.parametrize("shape", [(0, 11), (3, 0, 11), (1, 1)])
def test_no_rows_and_one_class(target: Target, shape: tuple[int, ...]) -> None:
    probabilities = torch.ones(shape, device=target.device, requires_grad=True)
    weight = torch.ones(shape[-1], 4, device=target.device)
    hidden = torch.ones(*shape[:-1], 4, device=target.device)
    for loss in (
        xent.cross_entropy(torch.zeros(shape, device=target.device), probabilities, backend=target.name),
        xent.linear_cross_entropy(hidden, weight, probabilities, backend=target.name),
    ):
        (found,) = torch.autograd.grad(loss, probabilities)
        assert found.shape == shape
        assert not found.any()


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
def test_beside_a_trained_scale(target: Target, tensors: dict[str, Tensor], function: str, read: bool) -> None:
    """`read`: whether the host can read softcap and scale, as on CPUs, or not, as in a compiled graph."""
    sources, probabilities = sources_of(tensors, function), tensors["target"]
    scale, cap = (torch.tensor(value, device=target.device) for value in (1.7, 3.0))
    scale.requires_grad_()

    def run(scale: Tensor, cap: Tensor, probabilities: Tensor, sources: dict[str, Tensor]) -> Any:
        options = {"logit_scale": scale, "softcap": cap, "backend": target.name}
        return getattr(xent, function)(**sources, target=probabilities, **options)

    torch._dynamo.reset()
    call = run if read else torch.compile(run, backend="aot_eager", fullgraph=True)
    made = call(scale, cap, probabilities, sources)
    logits = sources.get("logits")
    if logits is None:
        logits = F.linear(sources["input"], sources["linear_weight"])
    expected = plain({"logits": cap * torch.tanh(scale * logits / cap)}, probabilities)
    torch.testing.assert_close(made, expected)
    asking = [probabilities, scale, *sources.values()]
    torch.testing.assert_close(
        torch.autograd.grad(made, asking), torch.autograd.grad(expected, asking), rtol=1e-05, atol=1e-06
    )


def test_heads(target: Target, tensors: dict[str, Tensor]) -> None:
    """Heads share one target. Its gradient is the sum over heads, each with its own shift."""
    hidden = torch.randn(2, 2, 6, 8, device=target.device)
    weight, probabilities = tensors["linear_weight"].detach(), tensors["target"]
    loss = xent.linear_cross_entropy(hidden, weight, probabilities, shift=(1, 2), backend=target.name)
    wanted = sum(
        plain({"logits": F.linear(hidden[head, :, :-shift], weight)}, probabilities[:, shift:])
        for head, shift in enumerate((1, 2))
    )
    assert isinstance(wanted, Tensor)
    torch.testing.assert_close(torch.autograd.grad(loss, probabilities), torch.autograd.grad(wanted, probabilities))


def test_inplace_is_an_error_and_no_grad_works(target: Target, tensors: dict[str, Tensor]) -> None:
    logits, probabilities = tensors["logits"] * 1, tensors["target"]
    with pytest.raises(ValueError, match=r"inplace=True overwrites the logits, .* pass inplace=False"):
        xent.cross_entropy(logits, probabilities, inplace=True, backend=target.name)
    with torch.no_grad():
        assert not xent.cross_entropy(logits, probabilities, backend=target.name).requires_grad
