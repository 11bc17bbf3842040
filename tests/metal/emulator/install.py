"""Install the emulator in place of an Apple GPU, for the whole process."""

import tempfile
from pathlib import Path

import mlx.core as mx
import pytest
import torch

from tests.metal.emulator.kernels import Emulator
from tests.metal.emulator.shaders import ShaderLibrary

__all__ = ["folder_of", "install"]


def folder_of(config: pytest.Config) -> Path:
    """Return the folder of compiled kernels, which processes and later runs share: in pytest's cache, if it has one."""
    if config.pluginmanager.hasplugin("cacheprovider"):
        return Path(config.cache.mkdir("metal"))
    folder = Path(tempfile.gettempdir(), "xent-metal")
    folder.mkdir(exist_ok=True)
    return folder


def install(folder: Path) -> Emulator:
    """Make backend "metal" available, with its kernels run by the emulator and compiled into `folder`.

    The emulator computes eagerly, without a graph, so `mx.compile` cannot trace it.
    """
    from xent.backends.metal import BACKEND, MetalBackend, torch_machine

    emulator = Emulator(folder)
    mx.fast.metal_kernel = emulator.metal_kernel
    torch.mps.compile_shader = lambda source: ShaderLibrary(emulator, source)
    BACKEND.__class__ = type("Emulated", (MetalBackend,), {"missing": None, "devices": lambda backend: ("cpu",)})
    torch_machine.MetalTorchBackend.missing, torch_machine.DEVICES = None, ("cpu",)
    return emulator
