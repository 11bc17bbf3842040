"""Compile recorded launches for a GPU, and read registers, spills and shared memory from the code."""

import functools
import importlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from tests.triton.compile.record import Launch, rebuilt

__all__ = ["TARGETS", "Built", "Gpu", "build"]

_KIB = 1024


class Gpu(NamedTuple):
    """A GPU, and what its programs may use."""

    target: GPUTarget
    shared: int
    """Bytes of shared memory of a program."""
    registers: int
    """Of a thread."""


TARGETS = {
    **{
        f"sm_{capability}": Gpu(GPUTarget("cuda", capability, 32), kib * _KIB, 255)
        for capability, kib in {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()
    },
    **{name: Gpu(GPUTarget("hip", name, 64), 64 * _KIB, 512) for name in ("gfx90a", "gfx942")},
    "gfx1100": Gpu(GPUTarget("hip", "gfx1100", 32), 64 * _KIB, 256),
}


class Built(NamedTuple):
    """What a compiled kernel uses, or the reason why it does not compile or fit."""

    failure: str | None = None
    registers: int = 0
    spilled: int = 0
    """Bytes of local memory of a thread."""
    shared: int = 0


class _Driver(DriverBase):
    """A driver without a GPU: device n is the n-th target. `JITFunction.warmup` compiles with it, and runs nothing."""

    launcher_cls = None

    def __init__(self) -> None:
        self.device = 0

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return list(TARGETS.values())[self.device].target

    def get_current_device(self) -> int:
        return self.device

    def set_current_device(self, device: int) -> None:
        self.device = device

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_empty_cache_for_benchmark(self) -> Any:
        raise NotImplementedError

    def clear_cache(self, cache: Any) -> None:
        raise NotImplementedError

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError


@functools.cache
def _driver() -> _Driver:
    driver = _Driver()
    triton.runtime.driver.set_active(driver)
    return driver


def build(launch: Launch, name: str) -> Built:
    """Compile a launch for a target. AMD's compiler has no limit of registers, so the option is left out there."""
    gpu = TARGETS[name]
    _driver().set_current_device(list(TARGETS).index(name))
    function = getattr(importlib.import_module(launch.module), launch.name)
    options = {key: value for key, value in launch.options if key != "maxnreg" or gpu.target.backend == "cuda"}
    try:
        made = function.warmup(*map(rebuilt, launch.arguments), **dict(launch.constants), **options, grid=(1,))
    except Exception as error:
        cause = error.__cause__ or error
        lines = str(cause).strip().splitlines() or [""]
        return Built(f"{type(cause).__name__}: {lines[-1][:160]}")
    registers, spilled = _read_cubin(made.asm["cubin"]) if "cubin" in made.asm else _read_amd(made.asm["amdgcn"])
    failure = None
    if made.metadata.shared > gpu.shared:
        failure = f"{made.metadata.shared} bytes of shared memory, and a program may have {gpu.shared}"
    elif registers > gpu.registers:
        failure = f"{registers} registers, and a thread may have {gpu.registers}"
    return Built(failure, registers, spilled, made.metadata.shared)


def _read_cubin(code: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    assert found is not None, shown
    return int(found[1]), int(found[2])


def _read_amd(code: str) -> tuple[int, int]:
    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", code)
        return int(found[1]) if found else 0

    return number("vgpr_count"), number("private_segment_fixed_size")
