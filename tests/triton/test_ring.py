"""Rows long enough for the ring kernel: one program a row, several a row, rows off the 16-byte boundaries.

Where there is no Hopper GPU the plain kernel passes the same tests.
"""

import math

import pytest
import torch

import xent
from tests.targets import Target
from xent.core.check.cases import OPTIONS, Case
from xent.core.check.judge import judge_case

LENGTHS = {"one program": 49_152, "three programs": 262_144, "shifted": 50_257}
NAMES = ["plain", "smoothing", "z_loss", "softcap", "scale, negative", "sample_weight", "softcap, z_loss", "weight"]
MANY = {"one program": (700, 49_152), "two programs": (500, 131_072), "shifted": (600, 50_257)}


def vocabulary_of(target: Target, length: str) -> int:
    """Return a length, or a twelfth where it is interpreted: one block of the plain kernel, or three."""
    return LENGTHS[length] // (12 if target.interpreted else 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("length", LENGTHS)
def test_options(target: Target, length: str, dtype: str, name: str) -> None:
    case = target.sized(Case("cross_entropy", (2, 5), vocabulary_of(target, length), dtype, name, OPTIONS[name]))
    for comparison in judge_case(target.backend, target.harness, case):
        assert comparison.passed, comparison


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("lead", [10.0, 20.0])
def test_gradient_of_a_sure_target_does_not_cancel(target: Target, lead: float, reduction: str, length: str) -> None:
    """It is 1 - p, of which float32 has few bits or none; the sum of the others' p has them all."""
    torch.manual_seed(0)
    vocabulary = vocabulary_of(target, length)
    logits, classes = torch.randn(4, vocabulary), torch.tensor([0, 3, vocabulary // 2, vocabulary - 1])
    logits[torch.arange(4), classes] = lead + math.log(vocabulary)
    wide = logits.double().requires_grad_()
    torch.nn.functional.cross_entropy(wide, classes, reduction="sum").backward()
    leaf = logits.to(target.device).requires_grad_()
    xent.cross_entropy(leaf, classes.to(target.device), reduction=reduction, backend=target.name).sum().backward()
    assert leaf.grad is not None
    assert wide.grad is not None
    found, expected = leaf.grad.cpu().double(), wide.grad
    torch.testing.assert_close(
        found.gather(1, classes[:, None]), expected.gather(1, classes[:, None]), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("softcap", [0.5, 200.0, 1e6])
@pytest.mark.parametrize("length", ["one program", "three programs"])
def test_softcaps_of_any_size(target: Target, length: str, softcap: float, dtype: str) -> None:
    options = {"softcap": softcap}
    case = target.sized(Case("cross_entropy", (2, 5), vocabulary_of(target, length), dtype, "softcap", options))
    for comparison in judge_case(target.backend, target.harness, case):
        assert comparison.passed, comparison


@pytest.mark.parametrize("length", ["one program", "three programs"])
def test_rows_that_share_memory(target: Target, length: str) -> None:
    torch.manual_seed(0)
    vocabulary = vocabulary_of(target, length)
    values = torch.randn(vocabulary + 3 * 64, device=target.device, dtype=torch.bfloat16)
    classes = torch.randint(vocabulary, (4,), device=target.device)
    for view in (values[:vocabulary].expand(4, -1), values.unfold(0, vocabulary, 64)):
        outcome = []
        for logits in (view.detach(), view.clone(memory_format=torch.contiguous_format).detach()):
            loss = xent.cross_entropy(logits.requires_grad_(), classes, backend=target.name)
            outcome.append((loss.detach(), *torch.autograd.grad(loss, logits)))
        for found, expected in zip(*outcome, strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("length", LENGTHS)
def test_linear(target: Target, length: str, dtype: str, name: str) -> None:
    options = {key: value for key, value in OPTIONS[name].items() if key != "weight"}
    case = Case("linear_cross_entropy", (24,), vocabulary_of(target, length), dtype, name, options, ignored=0.0)
    for comparison in judge_case(target.backend, target.harness, case):
        assert comparison.passed, comparison


@pytest.mark.parametrize("length", MANY)
@pytest.mark.parametrize("inplace", [False, True])
def test_many_rows_time_and_again(target: Target, length: str, inplace: bool) -> None:
    """More rows than programs, so that slots are used over and over: the same bits each time, and the right ones."""
    rows, vocabulary = MANY[length]
    if target.device == "cpu":
        rows, vocabulary = 9, 1003
    torch.manual_seed(0)
    logits = (3 * torch.randn(rows, vocabulary, device=target.device)).bfloat16()
    classes = torch.randint(vocabulary, (rows,), device=target.device)
    classes[::7] = -100
    logits[0], logits[7, 3] = torch.nan, torch.inf
    logits[5, : vocabulary // 2] = -torch.inf
    classes[5] = vocabulary - 1

    def run(backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logits.clone().requires_grad_()
        loss = xent.cross_entropy(leaf * 1, classes, inplace=inplace, z_loss=1e-3, backend=backend)
        (grad,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), grad

    loss, grad = run("torch")
    first_loss, first_grad = run(target.name)
    torch.testing.assert_close(first_loss, loss, rtol=1e-5, atol=0)
    difference = (first_grad.float() - grad.float()).norm(dim=-1)
    assert (difference <= 2**-8 * grad.float().norm(dim=-1)).all()
    for _ in range(4):
        again_loss, again_grad = run(target.name)
        assert torch.equal(again_loss, first_loss)
        assert torch.equal(again_grad, first_grad)
