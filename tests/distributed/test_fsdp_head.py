"""The head of a model that FSDP2 shards, in a loop of one's own: one line gathers it for the loss."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import xent
from tests.distributed.fsdp import averages
from tests.distributed.pool import PROCESSES, Pool, device


class Body(nn.Module):
    """A model whose forward returns hidden states, and does not call the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.lm_head = nn.Linear(8, 8), nn.Linear(8, 50, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return hidden states."""
        return torch.tanh(self.body(input))


def run(group: str) -> None:
    """Compare the gradients of all ranks' tokens with those of the whole model."""
    mesh = init_device_mesh(device().type, (PROCESSES,))
    torch.manual_seed(0)
    model = Body().to(device())
    whole = Body().to(device())
    whole.load_state_dict(model.state_dict())
    tokens = torch.randn(PROCESSES, 6, 8, device=device())
    labels = torch.randint(50, (PROCESSES, 6), device=device())
    if group == "its own":
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    rank = dist.get_rank()
    hidden = model(tokens[rank])
    (model.lm_head if group == "its own" else model).unshard()  # type: ignore[operator]
    xent.linear_cross_entropy(hidden, model.lm_head.weight, labels[rank]).backward()
    divisor = PROCESSES if averages(mesh) else 1
    losses = [xent.linear_cross_entropy(whole(tokens[r]), whole.lm_head.weight, labels[r]) for r in range(PROCESSES)]
    (sum(losses) / divisor).backward()  # type: ignore[union-attr]
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]


@pytest.mark.parametrize("group", ["its own", "that of the model"])
def test_gathered_head(group: str, pool: Pool) -> None:
    pool.run(run, group)
