"""FSDP2 and DTensors: does FSDP2 average gradients (PyTorch 2.8 adds them up over gloo), and DTensors in one piece."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

__all__ = ["averages", "whole"]


def averages(mesh: DeviceMesh) -> bool:
    """Return whether FSDP2 averages gradients over the ranks of a mesh, as it says. All ranks call this."""
    device = "cpu" if mesh.device_type == "cpu" else torch.accelerator.current_accelerator()
    model = fully_shard(nn.Linear(4, 4, bias=False, device=device), mesh=mesh)
    model(torch.ones(1, 4, device=device)).sum().backward()
    return bool(model.weight.grad.full_tensor()[0, 0] == 1)


def whole(value: Any) -> Any:
    """Return a DTensor in one piece, and anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value
