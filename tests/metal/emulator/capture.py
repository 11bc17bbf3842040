"""Capture what MLX would pass to Metal: the complete source of a kernel, and how a launch binds its arguments."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

__all__ = ["Parameter", "Source", "capture", "parameters", "read"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel function."""

    name: str
    type: str
    """As written: "const device float*", "const constant int&", "uint3"."""
    attribute: str
    """"buffer(3)", or the name of a thread's attribute."""


@dataclass(frozen=True)
class Source:
    """A kernel as MLX generates it for inputs of these dtypes and sizes."""

    name: str
    text: str
    instance: str
    """The function with its template arguments."""
    parameters: tuple[Parameter, ...]


def capture(launch: Callable[..., Any], inputs: list[mx.array]) -> Source:
    """Return the source of the one kernel that `launch(*inputs)` starts; nothing is evaluated."""
    primitives = []

    def keep(node: dict[str, Any]) -> None:
        if node["type"] == "primitive" and node["name"] == "CustomKernel":
            primitives.append(node["arguments"])

    mx.export_function(keep, launch, *[mx.zeros(array.shape, array.dtype) for array in inputs])
    (arguments,) = primitives
    name, text = arguments[:2]
    instance = re.search(rf"decltype\(({name}<[^;]*>)\)", text)
    return Source(name, text, instance[1] if instance else name, parameters(text, name))


def read(text: str) -> dict[str, Source]:
    """Return the kernels that a whole source instantiates, by the names that the host finds them under."""
    instances = re.findall(r'template \[\[host_name\("(\w+)"\)\]\] \[\[kernel\]\] decltype\(((\w+)<[^;]*>)\)', text)
    return {name: Source(name, text, instance, parameters(text, function)) for name, instance, function in instances}


def parameters(text: str, name: str) -> tuple[Parameter, ...]:
    """Read the parameters of a kernel function."""
    signature = re.search(rf"\[\[kernel[^\]]*\]\] void {name}\((.*?)\) \{{", text, re.DOTALL)
    assert signature is not None, text
    pattern = re.compile(r"\s*(.*?)\s*(\w+)\s*\[\[(.*)\]\]\s*", re.DOTALL)
    found = []
    for part in re.split(r",\s*\n", signature[1]):
        match = pattern.fullmatch(part)
        assert match is not None, part
        found.append(Parameter(match[2], match[1], match[3]))
    return tuple(found)
