"""The device of MLX. Its arrays have no device: operations run on the current default device."""

import re
from functools import cache
from importlib import metadata

import mlx.core as mx

__all__ = ["chunk_device", "device_type", "devices", "has_fused_loss", "version"]


@cache
def version() -> str:
    """Return MLX's version."""
    return metadata.version("mlx")


def device_type() -> str:
    """Return "cpu" or "gpu"."""
    return "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"


def devices() -> tuple[str, ...]:
    """Return the available device types, the accelerator first."""
    return ("gpu", "cpu") if mx.is_available(mx.gpu) else ("cpu",)


def chunk_device() -> str:
    """Return "mlx-cpu", "metal" or "mlx-cuda", the device names of `xent.core.chunks`."""
    if device_type() == "cpu":
        return "mlx-cpu"
    return "metal" if mx.metal.is_available() else "mlx-cuda"


def has_fused_loss() -> bool:
    """Whether `mlx.core.fast.cross_entropy` is one kernel on this device. Elsewhere it rounds to the logits' dtype."""
    if device_type() == "cpu":
        return False
    number = tuple(map(int, re.findall(r"\d+", version())[:3]))
    return number >= ((0, 32, 4) if mx.metal.is_available() else (0, 32, 2))
