"""The replacement of TRL's divergence has the same results and gradients, or is closer to float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as Theirs

from tests.integrations.models import device
from xent.integrations.trl import ChunkedDivergenceFunction

ROWS, VOCABULARY = 9, 33
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scales and softcaps": {"scales": (0.5, 1.5), "softcaps": (2.0, 3.0), "temperature": 1.2},
    "bias": {"bias": True},
}


def inputs(bias: bool = False, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Return hidden states, classifier and bias of student and teacher, of different widths."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for width in (16, 24):
        sizes = [(ROWS, width), (VOCABULARY, width), *([(VOCABULARY,)] if bias else [])]
        sides = [torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in sizes]
        made += sides if bias else [*sides, None]
    return made


def rest(beta: float, options: dict[str, Any]) -> tuple[Any, ...]:
    (student, teacher), caps = options.get("scales", (1.0, 1.0)), options.get("softcaps", (None, None))
    return beta, options.get("temperature", 1.0), student, caps[0], teacher, caps[1]


def definition(given: list[Any], beta: float, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the results of these names, computed in float64 by their definitions."""
    wide = [None if each is None else each.double() for each in given]
    _, temperature, *bends = rest(beta, options)
    sides = []
    for side, (scale, cap) in zip((wide[:3], wide[3:]), (bends[:2], bends[2:]), strict=True):
        x = F.linear(*side) * scale
        sides.append(((x if cap is None else cap * torch.tanh(x / cap)) / temperature).log_softmax(-1))
    student, teacher = sides[0], sides[1].detach()

    def divergence(first: Tensor, second: Tensor) -> Tensor:
        return (first.exp() * (first - second)).sum(-1)

    entropy = -(student.exp() * student).sum(-1).detach()
    if beta in (0.0, 1.0):
        return divergence(teacher, student) if beta == 0 else divergence(student, teacher), entropy
    mixed = ((1 - beta) * student.exp() + beta * teacher.exp()).log()
    return beta * divergence(teacher, mixed) + (1 - beta) * divergence(student, mixed), entropy


def gradients(results: Any, given: list[Any], upstream: Tensor) -> list[Tensor | None]:
    wanted = [each for each in given if each is not None]
    return list(torch.autograd.grad(results[0], wanted, upstream.to(results[0].dtype), allow_unused=True))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", OPTIONS)
def test_float32(name: str, beta: float) -> None:
    options = dict(OPTIONS[name])
    given = inputs(options.pop("bias", False))
    upstream = torch.randn(ROWS, generator=torch.Generator().manual_seed(1)).to(device)
    ours = ChunkedDivergenceFunction.apply(*given, *rest(beta, options))
    theirs, truth = Theirs.apply(*given, *rest(beta, options)), definition(given, beta, options)
    for mine, other, true in zip(ours, theirs, truth, strict=True):
        assert mine.dtype == other.dtype == torch.float32
        assert mine.requires_grad == other.requires_grad
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=5e-6)
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=5e-6)
    mine, other, true = (gradients(results, given, upstream) for results in (ours, theirs, truth))
    students = len(given) // 2 - given.count(None) // 2
    assert all(each is None for each in mine[students:])
    torch.testing.assert_close(mine[:students], other[:students], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine[:students], true[:students], rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_bfloat16(beta: float) -> None:
    given = inputs(dtype=torch.bfloat16)
    upstream = torch.randn(ROWS, generator=torch.Generator().manual_seed(1)).to(device)
    truth = definition(given, beta, {})
    true = gradients(truth, given, upstream)
    errors = []
    for function in (ChunkedDivergenceFunction, Theirs):
        results = function.apply(*given, beta)
        found = gradients(results, given, upstream)[:2]
        assert {each.dtype for each in found if each is not None} == {torch.bfloat16}
        values = [(each - right).abs().max().item() for each, right in zip(results, truth, strict=True)]
        assert max(values) < 1e-4
        errors.append([(each - right).abs().max().item() for each, right in zip(found, true, strict=False)])
    assert all(mine <= 1.5 * other for mine, other in zip(*errors, strict=True))


def test_dtypes_that_differ_and_autocast() -> None:
    """The trainer keeps the teacher's classifier in the dtype in which it was loaded."""
    given = inputs()
    given[4] = given[4].detach().bfloat16()
    torch.testing.assert_close(
        ChunkedDivergenceFunction.apply(*given, 0.5), Theirs.apply(*given, 0.5), rtol=1e-5, atol=5e-6
    )
    with torch.autocast(device, torch.bfloat16):
        ours, theirs = ChunkedDivergenceFunction.apply(*given, 0.5), Theirs.apply(*given, 0.5)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_no_rows() -> None:
    given = inputs()
    given[0], given[3] = given[0][:0], given[3][:0]
    results = ChunkedDivergenceFunction.apply(*given, 0.5)
    assert [tuple(each.shape) for each in results] == [(0,)] * 2
    assert not torch.autograd.grad(results[0].sum(), given[1])[0].any()
