"""Puts the emulator in the place of an Apple GPU, for the whole process."""

from pathlib import Path

import mlx.core as mx
import torch

from tests.metal.emulator.kernels import Emulator
from tests.metal.emulator.shaders import ShaderLibrary

__all__ = ["install"]


def install(folder: Path) -> Emulator:
    """Let backend "metal" run, its kernels in the emulator, compiled ones in `folder`.

    The emulator computes when it is called, and has no graph: `mx.compile` cannot trace it.
    """
    from xent.backends.metal import machine, torch_machine

    emulator = Emulator(folder)
    mx.fast.metal_kernel = emulator.metal_kernel
    torch.mps.compile_shader = lambda source: ShaderLibrary(emulator, source)
    for found in (machine, torch_machine):
        found.MISSING, found.DEVICES = None, ("cpu",)
    return emulator
