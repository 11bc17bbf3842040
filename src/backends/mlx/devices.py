"""Which device MLX computes on. Its arrays have none: operations run on the default device of the moment."""

from importlib import metadata

import mlx.core as mx

__all__ = ["chunk_device", "device_type", "devices", "version"]


def version() -> str:
    """Return MLX's version."""
    return metadata.version("mlx")


def device_type() -> str:
    """Return "cpu" or "gpu"."""
    return "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"


def devices() -> tuple[str, ...]:
    """Return the device types that can be used, the accelerator first."""
    return ("gpu", "cpu") if mx.is_available(mx.gpu) else ("cpu",)


def chunk_device() -> str:
    """Return "cpu", "metal" or "mlx-cuda", which differ in how much a chunk should hold."""
    if device_type() == "cpu":
        return "cpu"
    return "metal" if mx.metal.is_available() else "mlx-cuda"
