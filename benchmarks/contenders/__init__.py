"""The contenders: one entry per implementation and function, in one file per kind of implementation."""

from __future__ import annotations

import re

from benchmarks.cases import Function
from benchmarks.contenders import floors, ours, peers, pytorch, sharded, training
from benchmarks.contenders.entry import CONTENDERS, Contender, LossFunction

__all__ = ["Contender", "LossFunction", "find_contender"]

_ = floors, peers, pytorch, sharded, training, training


def find_contender(function: Function, name: str) -> Contender:
    """Return the entry for this function and name, or create one for a workspace; KeyError if there is neither.

    "xent N MiB" has that workspace, "xent N chunks" an Nth of the logits.
    """
    if (function, name) in CONTENDERS:
        return CONTENDERS[function, name]
    match = re.fullmatch(r"xent (\d+) (MiB|chunks)", name)
    if match is None or function != "linear":
        raise KeyError(f"no contender {name!r} for function {function!r}")
    number, in_mib = int(match[1]), match[2] == "MiB"
    make = ours.linear(lambda case: number * 2**20 if in_mib else -(-case.logits_bytes // number))
    return Contender(name, make, kind="ours")
