"""The facts about machine, device, versions and commit without which a number says nothing: a line of every result."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError, check_output
from typing import Any

import psutil

__all__ = ["device_facts", "machine_facts", "merge"]

_ROOT = Path(__file__).resolve().parent.parent
_DISTRIBUTIONS = ("torch", "xent-loss", "numpy", "triton", "mlx")
_DISTRIBUTIONS += ("transformers", "trl", "liger-kernel", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl")
_VARIABLES = ("NCCL_NVLS_ENABLE", "NCCL_ALGO", "CUDA_DEVICE_MAX_CONNECTIONS", "XENT_BACKEND")


def machine_facts() -> dict[str, Any]:
    """Collect processor, its load in percent, time, commit and versions; what is not known or installed is None."""
    changed = _output("git", "-C", str(_ROOT), "status", "--porcelain", "--", "src")
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "busy": psutil.cpu_percent(0.2),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": f"{commit} with changes" if changed else commit,
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _DISTRIBUTIONS}},
    }


def device_facts(device: str) -> dict[str, Any]:
    """Collect name, memory, multiprocessors, driver, versions and xent's backends; RuntimeError if there is no GPU."""
    import torch

    import xent

    facts: dict[str, Any] = {"xent_backends": [each.name for each in xent.backends() if each.available]}
    if device == "cpu":
        return facts
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
    properties = torch.cuda.get_device_properties()
    return facts | {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "driver": (_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").split("\n")[0],
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
    }


def merge(machine: dict[str, Any], device: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of both."""
    return machine | device | {"versions": machine["versions"] | device.get("versions", {})}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """Return what a command prints; None if it does not run."""
    try:
        return check_output(command, text=True, stderr=DEVNULL).strip()
    except (OSError, CalledProcessError):
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()
