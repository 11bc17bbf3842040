"""The replacement of `torch.mps.compile_shader`: the same library and call for CPU tensors, executed at once.

Tensors that share memory, such as logits and a gradient in place, are bound to the same pages.
"""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.metal.emulator import frontend
from tests.metal.emulator.capture import Parameter, Source, read
from tests.metal.emulator.kernels import Emulator
from tests.metal.emulator.launch import EmulatorError, launch
from tests.metal.emulator.memory import Buffer

__all__ = ["ShaderLibrary"]

_SCALARS = {"constant long&": (int, np.int64), "constant float&": (float, np.float32)}


class ShaderLibrary:
    """The kernels of a source, as attributes; SyntaxError if a rejection by Apple's compiler is simulated."""

    def __init__(self, emulator: Emulator, text: str) -> None:
        assert text.isascii()  # PyTorch passes it as ASCII
        self._emulator, self._sources = emulator, read(text)
        for source in self._sources.values():
            emulator.sources.append(source)
            frontend.check(source)
            if not emulator.limit(source):
                raise SyntaxError(f"program_source: error: {source.name} is refused")

    def __getattr__(self, name: str) -> "ShaderKernel":
        return ShaderKernel(self._emulator, self._sources[name])


@dataclass(frozen=True)
class ShaderKernel:
    """One kernel; see PyTorch's documentation of compile_shader for its call."""

    emulator: Emulator
    source: Source

    @property
    def max_threads_per_threadgroup(self) -> int:
        """The number of threads that the pipeline allows."""
        declared = re.search(r"max_total_threads_per_threadgroup\((\d+)\)", self.source.text)
        limit = self.emulator.limit(self.source)
        return min(limit, int(declared[1])) if declared else limit

    def __call__(self, *arguments: Any, threads: Sequence[int], group_size: Sequence[int]) -> None:
        """Run the kernel; its writes are in the tensors when it returns."""
        bound = [parameter for parameter in self.source.parameters if parameter.attribute.startswith("buffer")]
        assert [parameter.attribute for parameter in bound] == [f"buffer({index})" for index in range(len(bound))]
        assert len(threads) == len(group_size)
        if int(np.prod(group_size)) > self.max_threads_per_threadgroup:
            raise ValueError(f"group size {tuple(group_size)} is beyond {self.max_threads_per_threadgroup}")
        if min(threads) < 1:
            raise EmulatorError(f"empty grid: {tuple(threads)} threads")
        memory = _Memory([argument for argument in arguments if isinstance(argument, Tensor)])
        seed = next(self.emulator.seed)
        try:
            places = {}
            for parameter, argument in zip(bound, arguments, strict=True):
                places[parameter.name] = memory.place(parameter, argument, bool(seed % 2))
            grid, size = ((*numbers, 1, 1)[:3] for numbers in (threads, group_size))
            launch(self.emulator.workshop, self.source, places, grid, size, seed)
            memory.copy_back(self.source)
        finally:
            memory.close()


@dataclass(eq=False)
class _Place:
    """The position of a tensor in a buffer."""

    buffer: Buffer
    address: int

    def explain(self, address: int) -> str | None:
        return self.buffer.explain(address)


class _Memory:
    """Buffers for the ranges of memory of some tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        stretches = sorted({_stretch(tensor) for tensor in tensors})
        self._stretches = []
        for start, stop in stretches:
            if self._stretches and start < self._stretches[-1][1]:
                start, stop = self._stretches[-1][0], max(stop, self._stretches[-1][1])
                self._stretches.pop()
            self._stretches.append((start, stop))
        self._buffers = {}
        self._scalars = []
        self._tensors = {}

    def place(self, parameter: Parameter, argument: Any, at_end: bool) -> _Place:
        """Return the address of an argument for the kernel."""
        if not isinstance(argument, Tensor):
            kind, dtype = _SCALARS[parameter.type]
            assert type(argument) is kind, f"{parameter.name} is {parameter.type} and gets {argument!r}"
            value = np.array(argument, dtype)
            self._scalars.append(Buffer(parameter.name, value.nbytes))
            self._scalars[-1].fill(value, read_only=True)
            return _Place(self._scalars[-1], self._scalars[-1].address)
        start, _ = _stretch(argument)
        first, stop = next(both for both in self._stretches if both[0] <= start < max(both[1], both[0] + 1))
        if first not in self._buffers:
            self._buffers[first] = Buffer(parameter.name, stop - first, at_end)
            self._buffers[first].fill(_bytes(first, stop))
        writes = parameter.type.startswith("device")
        self._tensors.setdefault(first, []).append((argument, writes))
        return _Place(self._buffers[first], self._buffers[first].address + start - first)

    def copy_back(self, source: Source) -> None:
        """Copy the kernel's writes back; EmulatorError for writes to inputs, or outside of the tensors."""
        for first, stop in self._stretches:
            if first not in self._buffers:
                continue
            buffer = self._buffers[first]
            strayed = buffer.overwritten()
            if strayed:
                raise EmulatorError(f"{source.name}: out of bounds: {strayed}")
            made = buffer.array(np.uint8, (stop - first,))
            changed = made != _bytes(first, stop)
            for tensor, writes in self._tensors[first]:
                if writes:
                    changed[_elements(tensor, first)] = False
            if changed.any():
                raise EmulatorError(f"{source.name}: memory of {buffer.name} was written to, which is no output")
            _bytes(first, stop)[:] = made

    def close(self) -> None:
        """Release the pages."""
        for buffer in (*self._buffers.values(), *self._scalars):
            buffer.close()


def _stretch(tensor: Tensor) -> tuple[int, int]:
    """Return the address range from a tensor's first element to the end of its last."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (
        extent + 1
    ) * tensor.itemsize if tensor.numel() else tensor.data_ptr()


def _bytes(start: int, stop: int) -> Any:
    """Return memory as an array that shares it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (stop - start)).from_address(start))


def _elements(tensor: Tensor, start: int) -> Any:
    """Return the offsets of all bytes of a tensor, relative to an address."""
    elements = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements = elements[..., None] + torch.arange(size) * stride
    offsets = elements.flatten().numpy() * tensor.itemsize + tensor.data_ptr() - start
    return (offsets[:, None] + np.arange(tensor.itemsize)).reshape(-1)
