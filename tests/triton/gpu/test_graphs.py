"""A CUDA graph can capture forward and backward, and gives correct results for changed inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.triton.gpu.calls import CALLS, Call, run

pytestmark = pytest.mark.usefixtures("poisoned")


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a graph of a step and its results, after a warm-up, which compiles kernels."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    return graph, made


def agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Compare. A capture computes ignored rows too, so chunks have other rows, and bfloat16 sums round differently."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2 * float(other.abs().max()))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_replay_with_other_inputs(call: Call) -> None:
    held = call.draw(0)
    graph, made = captured(lambda: run(call, held))
    for seed in (1, 2):
        fresh = call.draw(seed)
        for place, values in zip(held, fresh, strict=True):
            place.data.copy_(values)
        graph.replay()
        agree(made, run(call, fresh))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad")  # PyTorch's function keeps the graph of its warm-up
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_graphed_callable(call: Call) -> None:
    graphed = torch.cuda.make_graphed_callables(call, call.draw(0))
    for seed in (1, 2):
        fresh = call.draw(seed)
        agree(run(graphed, fresh), run(call, fresh))


def test_forward_alone() -> None:
    call = Call("linear_cross_entropy", {"reduction": "none"})
    held, fresh = ([tensor.detach() for tensor in call.draw(seed)] for seed in (0, 1))
    graph, loss = captured(lambda: call(*held))
    for place, values in zip(held, fresh, strict=True):
        place.copy_(values)
    graph.replay()
    assert torch.equal(loss, call(*fresh))


def test_training_step_is_captured_whole() -> None:
    """Loss, gradients and the optimizer's step in one graph: the loss falls as it does without a graph."""
    hidden = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(500, (64,), device="cuda")
    weight = torch.zeros(500, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> Tensor:
        loss = xent.linear_cross_entropy(hidden, weight, target, backend="triton")
        (grad,) = torch.autograd.grad(loss, weight)
        weight.data.sub_(grad)
        return loss.detach()

    plain = [float(step()) for _ in range(6)]
    graph, loss = captured(step)
    weight.data.zero_()
    replayed = []
    for _ in range(6):
        graph.replay()
        replayed.append(float(loss))
    assert plain[-1] < plain[0] - 0.1
    assert replayed == pytest.approx(plain, rel=1e-3)
