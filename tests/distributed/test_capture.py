"""A CUDA graph with a vocabulary in shards, in a group of one rank over NCCL, which makes the same collectives."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xent

if not torch.cuda.is_available():
    pytest.skip("CUDA graphs need a GPU", allow_module_level=True)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_capture(alone: Any) -> None:
    hidden = torch.randn(64, 32, device="cuda", requires_grad=True)
    weight = torch.randn(200, 32, device="cuda", requires_grad=True)
    target = torch.randint(200, (64,), device="cuda")

    def step(shards: Any) -> tuple[torch.Tensor, ...]:
        loss = xent.linear_cross_entropy(hidden, weight, target, vocab_parallel=shards)
        # Without detach(), the graph of the captured call would keep nodes of its stream.
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    named = xent.VocabParallel(alone, first=0, size=200)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(named)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        made = step(named)
        with pytest.raises(RuntimeError, match=r"VocabParallel\(group, first=200 \* group.rank\(\), size=200\)"):
            step(alone)
    hidden.data.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(made, step(named), strict=True):
        assert torch.equal(one, other)
