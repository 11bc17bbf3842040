"""Fused losses of other projects, called as their documentation recommends.

Liger-Kernel overwrites its logits with the gradient, and quack has an option for it; their entries say so.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.cases import Case
from benchmarks.contenders.entry import LossFunction, contender, find_peer
from benchmarks.process import Absent

__all__: list[str] = []

_LIGER = "liger_kernel.transformers.functional"
_TRL_CLASSES = 32768


def _flat(case: Case, function: LossFunction) -> LossFunction:
    """Flatten a batch of sequences for a function of rows."""
    if not case.batch:
        return function
    return lambda logits, target: function(logits.flatten(0, -2), target.flatten())


@contender("Liger", "linear")
def _liger_linear(case: Case) -> LossFunction:
    return partial(find_peer(_LIGER, "liger_fused_linear_cross_entropy", case.device), reduction=case.reduction)


@contender("Liger in place", "logits", in_place=True)
def _liger_logits(case: Case) -> LossFunction:
    return _flat(case, partial(find_peer(_LIGER, "liger_cross_entropy", case.device), reduction=case.reduction))


@contender("CCE", "linear")
def _cce(case: Case) -> LossFunction:
    return partial(find_peer("cut_cross_entropy", "linear_cross_entropy", case.device), reduction=case.reduction)


def _quack_linear(chunk_size: int, case: Case) -> LossFunction:
    function = find_peer("quack.linear_cross_entropy", "chunked_linear_cross_entropy", case.device)
    return partial(function, reduction=case.reduction, chunk_size=chunk_size)


for _rows in (2048, 4096, 8192):
    contender(f"quack {_rows}", "linear")(partial(_quack_linear, _rows))


@contender("quack", "logits")
def _quack(case: Case, inplace: bool = False) -> LossFunction:
    function = find_peer("quack.cross_entropy", "cross_entropy", case.device)
    return _flat(case, partial(function, reduction=case.reduction, inplace_backward=inplace))


contender("quack in place", "logits", in_place=True)(partial(_quack, inplace=True))


@contender("TRL", "linear log-probabilities")
def _trl_linear(case: Case) -> LossFunction:
    function: Any = find_peer("trl.kernels.chunked_logprob", "ChunkedLogProbFunction", case.device)
    options = (1.0, _TRL_CLASSES, None, 1.0, ("entropy",))
    return lambda input, weight, target: function.apply(input, weight, None, target, *options)[:2]


@contender("TRL", "log-probabilities")
def _trl_logits(case: Case) -> LossFunction:
    return find_peer("trl.kernels.logprob_entropy", "selective_log_softmax_and_entropy", case.device)


@contender("CCE without entropy", "linear log-probabilities")
def _cce_log_probs(case: Case) -> LossFunction:
    function = find_peer("cut_cross_entropy", "linear_cross_entropy", case.device)
    return lambda input, weight, target: -function(input, weight, target, reduction="none")


def _beta(case: Case) -> float:
    options = dict(case.options)
    if "top_k" in options:
        raise Absent("takes no stored classes")
    return float(options.get("beta", 0.0))


@contender("TRL", "linear divergence")
def _trl_divergence(case: Case) -> LossFunction:
    beta = _beta(case)
    apply = find_peer("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction", case.device).apply  # type: ignore[attr-defined]
    return lambda x, w, teacher_x, teacher_w: apply(x, w, None, teacher_x, teacher_w, None, beta)[0].mean()


@contender("Liger", "linear divergence")
def _liger_divergence(case: Case) -> LossFunction:
    beta = _beta(case)
    return partial(find_peer(_LIGER, "liger_fused_linear_jsd", case.device), jsd_beta=beta)
