"""Losses and gradients of models sharded by FSDP, patched and unpatched.

This is a script for several processes. It prints the ways to shard. The gradients of a loss that is computed
outside of the model do not pass through its outputs, whose hooks gather FSDP's weights for the backward pass.
"""

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.integrations.models import batch, make
from tests.integrations.models import device as kind
from xent.integrations.transformers import patch
from xent.integrations.transformers.deferred import is_open

__all__ = ["WAYS"]

WAYS = (
    "FSDP2, one group",
    "FSDP2, head alone",
    "FSDP2, norm and head",  # as accelerate does
    "FSDP2, norm and head, taken away",
    "FSDP1, head alone",
)


def shard(model: Any, way: str, device: torch.device) -> Any:
    """Return the model, sharded in one of `WAYS`."""
    if way == "FSDP1, head alone":
        model.lm_head = FullyShardedDataParallel(model.lm_head, use_orig_params=True, device_id=device)
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=device)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    if way == "FSDP2, head alone":
        fully_shard(model.lm_head, mesh=mesh)
    elif way.startswith("FSDP2, norm and head"):
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward="taken away" in way)
    return fully_shard(model, mesh=mesh, reshard_after_forward=way != "FSDP2, one group")


def step(way: str, outside: bool, patched: bool, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor], bool]:
    """Return the loss, this process's gradients, and whether the logits stayed deferred."""
    model = make("llama").to(device)
    if patched:
        patch(model)
    model = shard(model, way, device)
    inputs = {name: value.to(device) for name, value in batch().items()}
    if outside:
        logits = model(inputs["input_ids"]).logits
        shifted = inputs["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), shifted)
    else:
        outputs = model(**inputs)
        loss, logits = outputs.loss, outputs.logits
    loss.backward()
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    return loss.detach(), [getattr(part, "_local_tensor", part) for part in gradients], is_open(logits)


def refuses_writes(way: str, device: torch.device) -> bool:
    """Write to the shards of the head's weight through `.data` before its logits are read; return what follows."""
    model = make("llama").to(device)
    patch(model)
    model = shard(model, way, device)
    logits = model(batch()["input_ids"].to(device)).logits
    for weight in model.get_submodule("lm_head").parameters():
        getattr(weight, "_local_tensor", weight).data.add_(1)
    try:
        logits.sum()
    except RuntimeError as error:
        return "written to through parameter.data" in str(error)
    return False


def main() -> None:
    """Compare patched and unpatched models, and print the results."""
    warnings.filterwarnings("error", message=".*returned a view tensor")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)  # otherwise all processes would gather weights on the first GPU
    dist.init_process_group()
    for way in WAYS:
        for outside in (False, True):
            expected, wanted, _ = step(way, outside, False, device)
            loss, found, deferred = step(way, outside, True, device)
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
            assert deferred
        if way.endswith("head alone"):
            assert refuses_writes(way, device)
        print(f"compared: {way}\n", end="", flush=True)  # one write: ranks may share a pipe


if __name__ == "__main__":
    main()
