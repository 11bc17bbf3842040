"""Processes with a common normalizer train the same model as one process with the joint batch.

They run on two GPUs with NCCL if there are two, else on the CPU with gloo.
"""

import datetime
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import xent
from tests.distributed.fsdp import averages

PROCESSES, STEPS, ROWS, CLASSES = 2, 10, 12, 50
GPUS = torch.cuda.is_available() and torch.cuda.device_count() >= PROCESSES
KINDS = ("ddp", "fsdp2")


class Model(nn.Module):
    """An embedding, a layer and a classifier, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 16)
        self.layer = nn.Linear(16, 16)
        self.classifier = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor, target: Tensor, normalizer: Tensor | None) -> Tensor:
        hidden = torch.tanh(self.layer(self.embedding(tokens)))
        return xent.linear_cross_entropy(
            hidden, self.classifier.weight, target, linear_bias=self.classifier.bias, normalizer=normalizer
        )


def train(kind: str, rank: int, processes: int, share: bool = True) -> dict[str, Tensor]:
    device = torch.device("cuda", rank) if GPUS else torch.device("cpu")
    torch.manual_seed(0)
    model = Model().to(device)
    wrapped = model
    factor = processes if share else 1
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    elif kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (processes,))
        fully_shard(model.layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        factor = processes if averages(mesh) else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens, target = torch.randint(CLASSES, (2, ROWS), generator=generator)
        target[: ROWS // 2 - 1 : 2] = -100  # more for one process than for the other
        mine = slice(rank, None, processes)
        tokens, target = tokens[mine].to(device), target[mine].to(device)
        count = (target != -100).sum()
        if processes > 1 and share:
            dist.all_reduce(count)
        (wrapped(tokens, target, count) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: _whole(value).cpu() for name, value in model.state_dict().items()}


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _work(rank: int, folder: str) -> None:
    if GPUS:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if GPUS else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=60),
    )
    trained = {kind: train(kind, rank, PROCESSES) for kind in KINDS}
    trained["means of each"] = train("ddp", rank, PROCESSES, share=False)
    if rank == 0:
        torch.save(trained, f"{folder}/trained.pt")
    time.sleep(1)  # PyTorch 2.13 can wait forever for gloo's threads if they still hold tensors
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch was built without torch.distributed")
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    mp.spawn(_work, (str(tmp_path),), PROCESSES)
    trained = torch.load(tmp_path / "trained.pt")
    expected = train("alone", 0, 1)
    for name, value in expected.items():
        for kind in KINDS:
            torch.testing.assert_close(trained[kind][name], value, rtol=1e-5, atol=1e-5)
    wrong = trained["means of each"]["classifier.weight"]
    assert not torch.allclose(
        wrong, expected["classifier.weight"], rtol=1e-3, atol=1e-3
    )  # such a difference is detected
