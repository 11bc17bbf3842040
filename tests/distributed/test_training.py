"""Processes of DistributedDataParallel with a common normalizer train the model of one process with the joint batch.

tests/distributed/test_dtensors.py has FSDP2.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import xent
from tests.distributed.pool import Pool, device, group

STEPS, ROWS, CLASSES = 10, 12, 50


class Model(nn.Module):
    """An embedding, a layer and a classifier, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 16)
        self.layer = nn.Linear(16, 16)
        self.classifier = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor, target: Tensor, normalizer: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embedding(tokens)))
        return xent.linear_cross_entropy(
            hidden, self.classifier.weight, target, linear_bias=self.classifier.bias, normalizer=normalizer
        )


def train(processes: int, share: bool = True) -> dict[str, Tensor] | None:
    """Return the weights after some steps; `share`: whether the normalizer is the number of tokens of all processes."""
    rank = dist.get_rank() if processes > 1 else 0
    if rank >= processes:
        return None
    torch.manual_seed(0)
    model = Model().to(device())
    wrapped = DistributedDataParallel(model, process_group=group(processes)) if processes > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens, target = torch.randint(CLASSES, (2, ROWS), generator=generator)
        target[: ROWS // 2 - 1 : 2] = -100  # more for one process than for the other
        tokens, target = (values[rank::processes].to(device()) for values in (tokens, target))
        count = (target != -100).sum()
        if processes > 1 and share:
            dist.all_reduce(count, group=group(processes))
        (wrapped(tokens, target, count) * (processes if share else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def test_two_processes_train_like_one(pool: Pool) -> None:
    expected = train(1)
    torch.testing.assert_close(pool.run(train, 2)[0], expected, rtol=1e-5, atol=1e-5)
    wrong = pool.run(train, 2, False)[0]["classifier.weight"]  # means of each process
    assert not torch.allclose(wrong, expected["classifier.weight"], rtol=1e-3, atol=1e-3)
