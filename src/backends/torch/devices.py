"""The devices of this PyTorch, and whether target values are checked on a device."""

import os

import torch

__all__ = ["devices", "looks_at_targets", "version"]


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
