"""Puts the emulator in the place of an Apple GPU, for the whole process."""

from pathlib import Path

import mlx.core as mx

from tests.metal.emulator.kernels import Emulator

__all__ = ["install"]


def install(folder: Path) -> Emulator:
    """Let backend "metal" run, its kernels in the emulator, compiled ones in `folder`.

    The emulator computes when it is called, and has no graph: `mx.compile` cannot trace it.
    """
    from xent.backends.metal import machine

    emulator = Emulator(folder)
    mx.fast.metal_kernel = emulator.metal_kernel
    machine.MISSING, machine.DEVICES = None, ("cpu",)
    return emulator
