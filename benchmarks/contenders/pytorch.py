"""PyTorch: unfused from logits in their own dtype and in float32, both compiled or checkpointed, and chunked.

Log-probabilities and divergences are those of `benchmarks.definitions`.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case, Function
from benchmarks.contenders.entry import LossFunction, Make, contender
from benchmarks.process import Absent

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["chunked_options"]

_CHECKPOINTED_ROWS = 1024


def _loss(case: Case, in_float32: bool = False) -> LossFunction:
    """Return the usual PyTorch code with the options of the case; statistics are returned after the loss."""
    import torch
    from torch.nn import functional

    options = dict(case.options)
    softcap, stats = options.pop("softcap", None), options.pop("stats", ())

    def entropy(logits: Tensor) -> Tensor:
        log_p = functional.log_softmax(logits, -1)
        return -(log_p.exp() * log_p).sum(-1)

    def of_logits(logits: Tensor, target: Tensor) -> Any:
        logits, target = logits.flatten(0, -2), target.flatten()
        if in_float32:
            logits = logits.float()
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        value = functional.cross_entropy(logits, target, reduction=case.reduction, **options)
        known: dict[str, Any] = {
            "accuracy": lambda: (logits.detach().argmax(-1) == target).float().mean(),
            "entropy": lambda: entropy(logits.detach()),
            "lse": lambda: torch.logsumexp(logits.detach(), -1),
        }
        return (value, *(known[name]() for name in stats)) if stats else value

    if case.is_linear:
        return lambda input, weight, target: of_logits(functional.linear(input, weight), target)
    if not (in_float32 or softcap or stats or case.batch):
        return partial(functional.cross_entropy, reduction=case.reduction, **options)
    return of_logits


def _compiled(in_float32: bool) -> Make:
    def make(case: Case) -> LossFunction:
        import torch

        if case.device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "cl"))):
            raise Absent("needs a C++ compiler")
        compiled: LossFunction = torch.compile(_loss(case, in_float32), dynamic=False)
        return compiled

    return make


_CROSS_ENTROPY: tuple[Function, Function] = ("linear", "logits")
for _suffix, _wide in (("", False), (" fp32 logits", True)):
    contender("torch" + _suffix, *_CROSS_ENTROPY, holds_logits=True)(partial(_loss, in_float32=_wide))
    contender("torch.compile" + _suffix, *_CROSS_ENTROPY, holds_logits=True)(_compiled(_wide))


def chunked_options() -> Any:
    """Return the options of PyTorch's chunked operator, or raise Absent."""
    import torch

    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Absent(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    return torch.nn.LinearCrossEntropyOptions()


@contender("torch chunked", "linear")
def _chunked(case: Case) -> LossFunction:
    options = chunked_options()
    from torch.nn import functional

    return partial(functional.linear_cross_entropy, reduction=case.reduction, options=options)


@contender("torch", "linear log-probabilities", "log-probabilities", holds_logits=True)
def _log_probs(case: Case, in_float32: bool = False) -> LossFunction:
    """Return the usual PyTorch code, with float32 logits, or with float32 only in the softmax."""
    from benchmarks.definitions import log_probabilities

    def of_logits(logits: Tensor, target: Tensor) -> Any:
        return log_probabilities(logits.float() if in_float32 else logits, target)

    if not case.is_linear:
        return of_logits
    return lambda input, weight, target: of_logits(input @ weight.T, target)


_log_probs_fp32 = partial(_log_probs, in_float32=True)
contender("torch fp32 logits", "linear log-probabilities", "log-probabilities", holds_logits=True)(_log_probs_fp32)


@contender("torch checkpointed", "linear log-probabilities")
def _checkpointed(case: Case) -> LossFunction:
    import torch
    from torch.utils.checkpoint import checkpoint

    of_rows = _log_probs_fp32(case)

    def log_probs(input: Tensor, weight: Tensor, target: Tensor) -> Any:
        chunks = zip(input.split(_CHECKPOINTED_ROWS), target.split(_CHECKPOINTED_ROWS), strict=True)
        parts = [checkpoint(of_rows, rows, weight, classes, use_reentrant=False) for rows, classes in chunks]
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    return log_probs


@contender("torch fp32 logits", "linear divergence", holds_logits=True)
def _divergence(case: Case) -> LossFunction:
    from benchmarks.definitions import divergence

    options = dict(case.options)

    def loss(input: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> Any:
        teacher = (first, second) if "top_k" in options else ((first @ second.T).float(),)
        return divergence((input @ weight.T).float(), teacher, options.get("beta", 0.0)).mean()

    return loss
