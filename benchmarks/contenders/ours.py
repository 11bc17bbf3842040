"""xent: by default, portable, in place, and with a given workspace.

"xent portable" runs with XENT_PORTABLE=1, which turns the Hopper kernels off, as on every other GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from benchmarks.cases import Case
from benchmarks.contenders.entry import Contender, LossFunction

__all__ = ["CONTENDERS", "with_workspace"]

_PORTABLE = {"XENT_PORTABLE": "1"}


def _linear(workspace: Callable[[Case], int | None] = lambda case: None) -> Callable[[Case], LossFunction]:
    def make(case: Case) -> LossFunction:
        import xent

        options = dict(case.options)
        return partial(xent.linear_cross_entropy, reduction=case.reduction, workspace=workspace(case), **options)

    return make


def _logits(inplace: bool) -> Callable[[Case], LossFunction]:
    def make(case: Case) -> LossFunction:
        import xent

        return partial(xent.cross_entropy, reduction=case.reduction, inplace=inplace, **dict(case.options))

    return make


def with_workspace(name: str) -> Contender | None:
    """Return the contender "xent N MiB" (that workspace) or "xent N chunks" (an Nth of the logits); None otherwise."""
    match = re.fullmatch(r"xent (\d+) (MiB|chunks)", name)
    if match is None:
        return None
    number, in_mib = int(match[1]), match[2] == "MiB"
    make = _linear(lambda case: number * 2**20 if in_mib else -(-case.logits_bytes // number))
    return Contender(name, "linear", make, kind="ours")


CONTENDERS: tuple[Contender, ...] = (
    Contender("xent", "linear", _linear(), kind="ours"),
    Contender("xent portable", "linear", _linear(), kind="ours", environment=_PORTABLE),
    Contender("xent", "logits", _logits(inplace=False), kind="ours"),
    Contender("xent portable", "logits", _logits(inplace=False), kind="ours", environment=_PORTABLE),
    Contender("xent inplace", "logits", _logits(inplace=True), kind="ours", in_place=True),
)
