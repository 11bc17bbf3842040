"""The GPU, driver and software versions of a measurement."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from subprocess import DEVNULL, CalledProcessError, check_output
from typing import Any

import torch

__all__ = ["gpu_facts"]

_DISTRIBUTIONS = ("triton", "liger-kernel", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl")


def gpu_facts(device: str) -> dict[str, Any]:
    """Collect name, memory, multiprocessors, driver, versions and xent's backends; RuntimeError if there is no GPU."""
    import xent

    facts: dict[str, Any] = {
        "versions": {name: _version(name) for name in _DISTRIBUTIONS},
        "xent_backends": [each.name for each in xent.backends() if each.available],
        "xent_backend_forced": os.environ.get("XENT_BACKEND", ""),
    }
    if device == "cpu":
        return facts
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
    properties = torch.cuda.get_device_properties()
    facts |= {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
    }
    facts["versions"] |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    return facts


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return check_output(command, text=True, stderr=DEVNULL).splitlines()[0].strip()
    except (OSError, CalledProcessError, IndexError):
        return None
