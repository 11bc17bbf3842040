"""What FSDP2 does to gradients: PyTorch 2.8 adds them up over the ranks where the backend is gloo."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

__all__ = ["averages"]


def averages(mesh: DeviceMesh) -> bool:
    """Return whether FSDP2 averages gradients over the ranks of a mesh, as it says. All ranks call this."""
    device = "cpu" if mesh.device_type == "cpu" else torch.accelerator.current_accelerator()
    model = fully_shard(nn.Linear(4, 4, bias=False, device=device), mesh=mesh)
    model(torch.ones(1, 4, device=device)).sum().backward()
    return bool(model.weight.grad.full_tensor()[0, 0] == 1)
