"""One launch of a compiled kernel over NumPy arrays."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.metal.emulator.build import Workshop
from tests.metal.emulator.capture import Source
from tests.metal.emulator.memory import Buffer

__all__ = ["EmulatorError", "Output", "launch", "run"]


class EmulatorError(Exception):
    """A kernel did something that Metal forbids or leaves undefined. This is not an error that MLX would raise."""


@dataclass(frozen=True)
class Output:
    """An array that a kernel writes."""

    name: str
    dtype: Any
    shape: tuple[int, ...]


def run(
    workshop: Workshop,
    source: Source,
    inputs: dict[str, Any],
    outputs: list[Output],
    grid: tuple[int, ...],
    threadgroup: tuple[int, ...],
    seed: int,
) -> list[Any]:
    """Run a kernel and return its outputs; memory that it does not write is NaN.

    The seed determines the order of threads, and which inputs end at the end of their pages. Outputs start at the start
    of a page, like MLX's allocations.
    """
    if min(grid) < 1 or min(threadgroup) < 1:
        raise EmulatorError(f"empty grid: {grid} threads in threadgroups of {threadgroup}")
    rng = np.random.default_rng(seed)
    buffers = {}
    try:
        for parameter in source.parameters:
            if not parameter.attribute.startswith("buffer"):
                continue
            values = _values(parameter.name, inputs)
            if values is not None:
                buffer = Buffer(parameter.name, values.nbytes, bool(rng.integers(2)))
                buffer.fill(values, read_only=True)
            else:
                (made,) = (output for output in outputs if output.name == parameter.name)
                buffer = Buffer(made.name, int(np.prod(made.shape)) * np.dtype(made.dtype).itemsize)
            buffers[parameter.name] = buffer
        launch(workshop, source, buffers, grid, threadgroup, seed)
        for buffer in buffers.values():
            strayed = buffer.overwritten()
            if strayed:
                raise EmulatorError(f"{source.name}: out of bounds: {strayed}")
        return [buffers[output.name].array(output.dtype, output.shape) for output in outputs]
    finally:
        for buffer in buffers.values():
            buffer.close()


def _values(name: str, inputs: dict[str, Any]) -> Any | None:
    """Return the value that MLX binds to a parameter: an input, or a property of one. None for an output."""
    if name in inputs:
        return inputs[name]
    array, _, about = name.rpartition("_")
    if array not in inputs:
        return None
    values = inputs[array]
    strides = [stride // values.itemsize for stride in values.strides]
    return {
        "shape": lambda: np.array(values.shape, np.int32),
        "strides": lambda: np.array(strides, np.int64),
        "ndim": lambda: np.array(values.ndim, np.int32),
    }[about]()


def launch(
    workshop: Workshop,
    source: Source,
    buffers: dict[str, Buffer],
    grid: tuple[int, ...],
    threadgroup: tuple[int, ...],
    seed: int,
    only: tuple[int, ...] | None = None,
) -> None:
    """Run a kernel over buffers, for the whole grid or for one threadgroup."""
    entry = workshop.kernel(source)
    addresses = [buffers[p.name].address if p.name in buffers else None for p in source.parameters]
    error, stray = ctypes.create_string_buffer(1024), ctypes.c_uint64()
    sizes = ctypes.c_uint32 * 3
    result = workshop.runtime().emulator_launch(
        entry,
        (ctypes.c_void_p * len(addresses))(*addresses),
        sizes(*grid),
        sizes(*threadgroup),
        None if only is None else sizes(*only),
        ctypes.c_uint64(seed),
        error,
        ctypes.c_size_t(len(error)),
        ctypes.byref(stray),
    )
    if result == 0:
        return
    message = error.value.decode()
    if result == 2:
        places = [buffer.explain(stray.value) for buffer in buffers.values()]
        message += "".join(f": {place}" for place in places if place)
    raise EmulatorError(f"{source.name}: {message}")
