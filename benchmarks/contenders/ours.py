"""xent: as it is, with the gradient in the logits' memory, and with as many workspaces as a curve needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.cases import Case
from benchmarks.contenders.entry import Contender, LossFunction
from benchmarks.suites.cuda import WORKSPACES

__all__ = ["CONTENDERS"]

_MIB = 2**20


def _linear(workspace: int | None = None) -> Callable[[Case], LossFunction]:
    def make(case: Case) -> LossFunction:
        import xent

        return partial(xent.linear_cross_entropy, reduction=case.reduction, workspace=workspace)

    return make


def _logits(inplace: bool) -> Callable[[Case], LossFunction]:
    def make(case: Case) -> LossFunction:
        import xent

        return partial(xent.cross_entropy, reduction=case.reduction, inplace=inplace)

    return make


CONTENDERS: tuple[Contender, ...] = (
    Contender("xent", "linear", _linear(), kind="ours"),
    Contender("xent, none ignored", "linear", _linear(), kind="ours", changes={"ignored": 0.0}),
    Contender("xent, all trained", "linear", _linear(), kind="ours", changes={"trained": ("input", "weight")}),
    *(Contender(f"xent {size} MiB", "linear", _linear(size * _MIB), kind="ours") for size in WORKSPACES),
    Contender("xent", "logits", _logits(inplace=False), kind="ours"),
    Contender("xent inplace", "logits", _logits(inplace=True), kind="ours", in_place=True),
)
