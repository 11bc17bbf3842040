"""The facts about the machine without which a number says nothing: written into every line of the results."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError, check_output
from typing import Any

import psutil

__all__ = ["machine_facts"]

_DISTRIBUTIONS = ("torch", "xent-loss", "numpy")


def machine_facts() -> dict[str, Any]:
    """Collect processor, cores, memory, system, time and versions; a distribution that is not installed is None."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _DISTRIBUTIONS}},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    try:
        return check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True, stderr=DEVNULL).strip()
    except (OSError, CalledProcessError):
        return platform.processor() or platform.machine()
