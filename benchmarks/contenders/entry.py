"""What an entry of the table of contenders is, and how it says that this machine cannot run it."""

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

    `make` imports its framework, because only the process that measures it should pay for that, and returns the
    function to measure: `loss(input, weight, target)` for "linear", `loss(logits, target)` for "logits", where target
    has shape (tokens,) and int64 classes, with the case's reduction. It raises `Absent` on a machine that cannot run
    it. For "sharded" it is `step(shards)`, forward and backward, see `benchmarks.contenders.sharded`.

    `kind`: "ours", "peer", or "floor": work that every implementation has to do, which is called like a loss function,
    returns anything, and has no backward of its own. `compiles`: the first call at a new shape compiles, so the
    warm-up has the full size. `in_place`: the gradient takes the place of the logits, so no memory has to exist for it.
    `holds_logits`: the full logits and as much again for their gradient are alive at one time, which a machine may not
    have the memory for. `environment`: variables that its framework reads once a process; on a GPU, where others share
    one, such a contender has its own.
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
        """Estimate roughly, from above, the bytes that a call takes, so that no machine starts to swap."""
        logits_sized = 3 if self.holds_logits and case.backward else 1 if self.holds_logits else 0
        return logits_sized * case.logits_bytes + 2 * case.gradient_bytes
