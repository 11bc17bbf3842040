"""The table of contenders, how one is added to it, and how other projects' functions are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from benchmarks.cases import Case, Function
from benchmarks.process import Absent

__all__ = ["CONTENDERS", "Contender", "LossFunction", "Make", "contender", "find_peer"]

LossFunction = Callable[..., Any]
"""Returns the loss, a tensor, or a tuple of it and statistics."""
Make = Callable[[Case], LossFunction]


@dataclass(frozen=True)
class Contender:
    """One implementation of one function.

    `make` imports its framework and returns the function to measure: `loss(input, weight, target)` for "linear",
    `loss(logits, target)` for "logits", with the case's reduction; target is (tokens,) int64. It raises `Absent` if the
    machine cannot run it. For "sharded" the function is `step(shards)`, forward and backward pass.

    `kind` is "ours", "peer", or "floor": work that every implementation has to do. A floor is called like a loss
    function, may return anything, and has no separate backward pass. `in_place`: the gradient overwrites the logits.
    `holds_logits`: the full logits and their gradient exist at one time, for which memory may not suffice.
    `environment`: variables that the framework reads once per process, so that the contender needs its own.
    """

    name: str
    make: Make
    kind: Literal["ours", "peer", "floor"] = "peer"
    in_place: bool = False
    holds_logits: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


CONTENDERS: dict[tuple[Function, str], Contender] = {}


def contender(name: str, *functions: Function, **facts: Any) -> Callable[[Make], Make]:
    """Add the decorated function as the `make` of a contender for these functions."""

    def add(make: Make) -> Make:
        CONTENDERS.update({(function, name): Contender(name, make, **facts) for function in functions})
        return make

    return add


def find_peer(module: str, name: str, device: str) -> Callable[..., Any]:
    """Import a function of a project that has no kernels for the CPU, or raise Absent with the reason."""
    package = module.partition(".")[0]
    try:
        function: Callable[..., Any] = getattr(import_module(module), name)
    except Exception as error:
        raise Absent(f"{module}.{name} does not import: {type(error).__name__}: {error}") from None
    if device == "cpu":
        raise Absent(f"{package} has no kernels for the CPU")
    return function
