"""The contenders: a table with one entry per implementation and function, in one file per kind of implementation."""

from __future__ import annotations

from benchmarks.cases import Function
from benchmarks.contenders import divergences, floors, fused, ours, pytorch, sampled, sharded
from benchmarks.contenders.entry import Absent, Contender, LossFunction

__all__ = ["CONTENDERS", "Absent", "Contender", "LossFunction", "find_contender"]

CONTENDERS: tuple[Contender, ...] = (
    *floors.CONTENDERS,
    *pytorch.CONTENDERS,
    *fused.CONTENDERS,
    *ours.CONTENDERS,
    *sampled.CONTENDERS,
    *divergences.CONTENDERS,
    *sharded.CONTENDERS,
)


def find_contender(function: Function, name: str) -> Contender:
    """Return the entry for this function and name, or create one for a workspace; KeyError if there is neither."""
    for contender in CONTENDERS:
        if (contender.function, contender.name) == (function, name):
            return contender
    made = ours.with_workspace(name) if function == "linear" else None
    if made is None:
        raise KeyError(f"no contender {name!r} for function {function!r}")
    return made
