"""Who is measured: one table, one entry per implementation and function, one file per kind of implementation."""

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
    """Look up the entry of the table for this function and name, or make that of a workspace; KeyError for neither."""
    for contender in CONTENDERS:
        if (contender.function, contender.name) == (function, name):
            return contender
    made = ours.with_workspace(name) if function == "linear" else None
    if made is None:
        raise KeyError(f"no contender {name!r} for function {function!r}")
    return made
