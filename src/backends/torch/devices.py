"""Which devices PyTorch has here, and whether the caller wants targets looked at where that synchronises."""

import os

import torch

__all__ = ["devices", "looks_at_targets", "version"]


def version() -> str:
    """Return PyTorch's version."""
    return str(torch.__version__)


def devices() -> tuple[str, ...]:
    """Return the device types that can be used, the accelerator first."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else (accelerator.type, "cpu")


def looks_at_targets(device: torch.device) -> bool:
    """Whether target values are checked before use: always on the CPU, elsewhere if XENT_CHECK_TARGETS=1."""
    return device.type == "cpu" or os.environ.get("XENT_CHECK_TARGETS") == "1"
