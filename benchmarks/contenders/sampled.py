"""Log-probabilities with the entropy: xent, TRL's kernels, Cut Cross Entropy, and the usual PyTorch code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case, Function
from benchmarks.contenders.entry import Contender, LossFunction
from benchmarks.contenders.fused import find_peer, refuse_cpu

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CONTENDERS"]

_LINEAR: Function = "linear log-probabilities"
_LOGITS: Function = "log-probabilities"
_TRL_CLASSES = 32768
_CHECKPOINTED_ROWS = 1024


def _ours(name: str) -> Callable[[Case], LossFunction]:
    def make(case: Case) -> LossFunction:
        import xent

        return partial(getattr(xent, name), entropy=True)

    return make


def _trl_linear(case: Case) -> LossFunction:
    function: Any = find_peer("trl.kernels.chunked_logprob", "ChunkedLogProbFunction")
    refuse_cpu(case, "TRL's tile kernel")

    def log_probs(input: Tensor, weight: Tensor, target: Tensor) -> Any:
        return function.apply(input, weight, None, target, 1.0, _TRL_CLASSES, None, 1.0, ("entropy",))[:2]

    return log_probs


def _trl_logits(case: Case) -> LossFunction:
    function = find_peer("trl.kernels.logprob_entropy", "selective_log_softmax_and_entropy")
    refuse_cpu(case, "TRL's row kernel")
    return function


def _cce(case: Case) -> LossFunction:
    function = find_peer("cut_cross_entropy", "linear_cross_entropy")
    refuse_cpu(case, "Cut Cross Entropy")
    return lambda input, weight, target: -function(input, weight, target, reduction="none")


def _unfused(in_float32: bool) -> Callable[[Case], LossFunction]:
    """Return the usual PyTorch code, with float32 logits, or with float32 only in the softmax."""

    def make(case: Case) -> LossFunction:
        import torch

        def of_logits(logits: Tensor, target: Tensor) -> Any:
            if in_float32:
                logits = logits.float()
            log_p = logits.log_softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
            return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

        if not case.is_linear:
            return of_logits
        return lambda input, weight, target: of_logits(input @ weight.T, target)

    return make


def _checkpointed(case: Case) -> LossFunction:
    import torch
    from torch.utils.checkpoint import checkpoint

    of_rows = _unfused(in_float32=True)(case)

    def log_probs(input: Tensor, weight: Tensor, target: Tensor) -> Any:
        chunks = zip(input.split(_CHECKPOINTED_ROWS), target.split(_CHECKPOINTED_ROWS), strict=True)
        parts = [checkpoint(of_rows, rows, weight, classes, use_reentrant=False) for rows, classes in chunks]
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    return log_probs


CONTENDERS: tuple[Contender, ...] = (
    Contender("xent", _LINEAR, _ours("linear_log_probs"), kind="ours"),
    Contender("TRL", _LINEAR, _trl_linear),
    Contender("CCE without entropy", _LINEAR, _cce),
    Contender("torch", _LINEAR, _unfused(in_float32=False), holds_logits=True),
    Contender("torch fp32 logits", _LINEAR, _unfused(in_float32=True), holds_logits=True),
    Contender("torch checkpointed", _LINEAR, _checkpointed),
    Contender("xent", _LOGITS, _ours("log_probs"), kind="ours"),
    Contender("TRL", _LOGITS, _trl_logits),
    Contender("torch fp32 logits", _LOGITS, _unfused(in_float32=True), holds_logits=True),
)
