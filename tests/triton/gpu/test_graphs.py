"""A CUDA graph can capture forward and backward, and gives correct results for changed inputs."""

import pytest
import torch
from torch import Tensor

import xent
from tests.triton.gpu.calls import CALLS, Call, run

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_replay_with_other_inputs(call: Call) -> None:
    held = call.draw(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled and buffers allocated before the capture
        for _ in range(2):
            run(call, held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(call, held)
    for seed in (1, 2, 3):
        fresh = call.draw(seed)
        with torch.no_grad():
            for place, values in zip(held, fresh, strict=True):
                place.copy_(values)
        graph.replay()
        for found, expected in zip(captured, run(call, fresh), strict=True):
            # A capture computes ignored rows too, so chunks have other rows, and their bfloat16 sum rounds differently.
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2 * float(expected.abs().max()))


def test_forward_alone() -> None:
    call = Call("linear_cross_entropy", {"reduction": "none"})
    hidden, weight, target = (tensor.detach() for tensor in call.draw(0))
    call(hidden, weight, target)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(hidden, weight, target)
    fresh = [tensor.detach() for tensor in call.draw(1)]
    for place, values in zip((hidden, weight, target), fresh, strict=True):
        place.copy_(values)
    graph.replay()
    assert torch.equal(captured, call(*fresh))


def test_training_step_is_captured_whole() -> None:
    """Loss, gradients and the optimizer's step in one graph: the loss falls as it does without a graph."""

    def losses(captured: bool) -> list[float]:
        torch.manual_seed(0)
        hidden = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
        target = torch.randint(500, (64,), device="cuda")
        weight = torch.zeros(500, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        def step() -> Tensor:
            loss = xent.linear_cross_entropy(hidden, weight, target, backend="triton")
            (grad,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                weight.sub_(grad, alpha=1.0)
            return loss.detach()

        if not captured:
            return [float(step()) for _ in range(6)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad():
            weight.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        found = []
        for _ in range(6):
            graph.replay()
            found.append(float(loss))
        return found

    plain, replayed = losses(captured=False), losses(captured=True)
    assert plain[-1] < plain[0] - 0.1
    assert replayed == pytest.approx(plain, rel=1e-3)
