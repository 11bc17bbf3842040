"""The devices of this PyTorch, and whether target values are checked on a device."""

import os

import torch
from torch import Tensor

__all__ = ["devices", "is_padded", "looks_at_targets", "version"]

# PyTorch's CUDA allocator rounds sizes up to multiples of 512 bytes.
_ROUNDS_UP = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") in ("", "0")


def version() -> str:
    """Return PyTorch's version."""
    return str(torch.__version__)


def devices() -> tuple[str, ...]:
    """Return the available device types, the accelerator first."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else (accelerator.type, "cpu")


def looks_at_targets(device: torch.device) -> bool:
    """Whether target values are checked before use: on the CPU always, elsewhere if XENT_CHECK_TARGETS=1."""
    return device.type == "cpu" or os.environ.get("XENT_CHECK_TARGETS") == "1"


def is_padded(tensor: Tensor) -> bool:
    """Whether the 16 bytes that hold the last element of a tensor's storage may all be read."""
    return (tensor.is_cuda and _ROUNDS_UP) or tensor.untyped_storage().nbytes() % 16 == 0
