"""Gradients in FP8 of models under DDP and FSDP2 are those of the whole model. A script for several processes."""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.fsdp import averages
from tests.integrations.models import batch, make
from tests.integrations.models import device as kind
from tests.integrations.sharded import shard
from xent.integrations.transformers import patch

__all__ = ["WAYS"]

WAYS = ("DDP", "FSDP2, one group", "FSDP2, head alone", "FSDP2, norm and head, taken away")


def step(way: str | None, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the whole gradients of the model, which is the same on all ranks, as its batch is."""
    model = make("llama").bfloat16().to(device)
    patch(model, precision="fp8")
    if way is not None:
        model = DistributedDataParallel(model) if way == "DDP" else shard(model, way, device)
    loss = model(**{name: value.to(device) for name, value in batch().items()}).loss
    loss.backward()
    gradients = [weight.grad for weight in model.parameters()]
    return loss.detach(), [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in gradients]


def main() -> None:
    """Compare all ways, and print them."""
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind != "cuda":
        os.environ["XENT_BACKEND"] = "torch"  # it emulates the products, where it is named
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    loss, gradients = step(None, device)
    added = 1 if averages(init_device_mesh(kind, (dist.get_world_size(),))) else dist.get_world_size()
    for way in WAYS:
        own, others = step(way, device)
        assert torch.equal(own, loss), way
        for gradient, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(other / (1 if way == "DDP" else added), gradient, rtol=2.0**-6, atol=1e-4)
        if dist.get_rank() == 0:
            print(way)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
