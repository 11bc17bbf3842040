"""The class of a contender, and the exception for one that this machine cannot run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.cases import Case, Function

__all__ = ["Absent", "Contender", "LossFunction"]

LossFunction = Callable[..., Any]
"""Returns the loss, a tensor, or a tuple of it and statistics."""


class Absent(Exception):
    """A contender that this machine cannot run; the message is the reason."""


@dataclass(frozen=True)
class Contender:
    """One implementation of one of the two functions.

    `make` imports its framework and returns the function to measure: `loss(input, weight, target)` for "linear",
    `loss(logits, target)` for "logits", with the case's reduction; target is (tokens,) int64. It raises `Absent` if the
    machine cannot run it. For "sharded" the function is `step(shards)`, forward and backward pass; see
    `benchmarks.contenders.sharded`.

    `kind` is "ours", "peer", or "floor": work that every implementation has to do. A floor is called like a loss
    function, may return anything, and has no separate backward pass. `compiles`: the first call at a new shape
    compiles, so the warm-up uses the full size. `in_place`: the gradient overwrites the logits. `holds_logits`: the
    full logits and their gradient exist at one time, for which memory may not suffice. `environment`: variables that
    the framework reads once per process; on a GPU such a contender runs in its own process.
    """

    name: str
    function: Function
    make: Callable[[Case], LossFunction]
    kind: Literal["ours", "peer", "floor"] = "peer"
    compiles: bool = False
    in_place: bool = False
    holds_logits: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def memory_needed(self, case: Case) -> int:
        """Return a rough upper bound on the bytes of a call, so that the machine does not swap."""
        logits_sized = 3 if self.holds_logits and case.backward else 1 if self.holds_logits else 0
        return logits_sized * case.logits_bytes + 2 * case.gradient_bytes
