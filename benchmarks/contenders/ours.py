"""xent: by default, portable, in place, with a given workspace, and its functions of RL and distillation.

"xent portable" runs with XENT_PORTABLE=1, which turns the Hopper kernels off, as on every other GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.cases import Case
from benchmarks.contenders.entry import LossFunction, Make, contender

__all__ = ["linear"]

_PORTABLE = {"XENT_PORTABLE": "1"}


def linear(workspace: Callable[[Case], int | None] = lambda case: None) -> Make:
    """Return the contender's `make` for a workspace."""

    def make(case: Case) -> LossFunction:
        import xent

        options = dict(case.options)
        return partial(xent.linear_cross_entropy, reduction=case.reduction, workspace=workspace(case), **options)

    return make


contender("xent", "linear", kind="ours")(linear())
contender("xent portable", "linear", kind="ours", environment=_PORTABLE)(linear())


@contender("xent", "logits", kind="ours")
@contender("xent portable", "logits", kind="ours", environment=_PORTABLE)
def _logits(case: Case, inplace: bool = False) -> LossFunction:
    import xent

    return partial(xent.cross_entropy, reduction=case.reduction, inplace=inplace, **dict(case.options))


contender("xent inplace", "logits", kind="ours", in_place=True)(partial(_logits, inplace=True))


@contender("xent", "linear log-probabilities", "log-probabilities", kind="ours")
def _log_probs(case: Case) -> LossFunction:
    import xent

    return partial(xent.linear_log_probs if case.is_linear else xent.log_probs, entropy=True)


@contender("xent", "linear divergence", kind="ours")
def _divergence(case: Case) -> LossFunction:
    import xent

    options = dict(case.options)
    make_teacher: Any = xent.LinearTeacher if options.pop("top_k", None) is None else xent.TopKTeacher
    return lambda input, weight, *teacher: xent.linear_divergence(input, weight, make_teacher(*teacher), **options)
