"""PyTorch: unfused from logits in their own dtype and in float32, both compiled, and its chunked operator."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case
from benchmarks.contenders.entry import Absent, Contender, LossFunction

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CONTENDERS"]


def _logits(case: Case, in_float32: bool = False) -> LossFunction:
    """Return the usual PyTorch code with the options of the case; statistics are returned after the loss."""
    import torch
    from torch.nn import functional

    options = dict(case.options)
    softcap, stats = options.pop("softcap", None), options.pop("stats", ())
    if not (in_float32 or softcap or stats or case.batch):
        return partial(functional.cross_entropy, reduction=case.reduction, **options)

    def entropy(logits: Tensor, target: Tensor) -> Tensor:
        log_p = functional.log_softmax(logits, -1)
        return -(log_p.exp() * log_p).sum(-1)

    known: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "accuracy": lambda logits, target: (logits.argmax(-1) == target).float().mean(),
        "entropy": entropy,
        "lse": lambda logits, target: torch.logsumexp(logits, -1),
    }

    def loss(logits: Tensor, target: Tensor) -> Any:
        logits, target = logits.flatten(0, -2), target.flatten()
        if in_float32:
            logits = logits.float()
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        value = functional.cross_entropy(logits, target, reduction=case.reduction, **options)
        if not stats:
            return value
        return value, *(known[name](logits.detach(), target) for name in stats)

    return loss


def _linear(case: Case, in_float32: bool = False) -> LossFunction:
    from torch.nn import functional

    of_logits = _logits(case, in_float32)

    def loss(input: Tensor, weight: Tensor, target: Tensor) -> Any:
        return of_logits(functional.linear(input, weight), target)

    return loss


def _compiled(make: Callable[[Case], LossFunction]) -> Callable[[Case], LossFunction]:
    def make_compiled(case: Case) -> LossFunction:
        import torch

        compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++", "cl"]
        if case.device == "cpu" and not any(map(shutil.which, compilers)):
            raise Absent(f"needs a C++ compiler, and none of {', '.join(compilers)} was found")
        compiled: LossFunction = torch.compile(make(case), dynamic=False)
        return compiled

    return make_compiled


def _chunked(case: Case) -> LossFunction:
    import torch
    from torch.nn import functional

    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Absent(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()

    def loss(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return functional.linear_cross_entropy(input, weight, target, reduction=case.reduction, options=options)

    return loss


_linear_fp32, _logits_fp32 = partial(_linear, in_float32=True), partial(_logits, in_float32=True)

CONTENDERS: tuple[Contender, ...] = (
    Contender("torch", "linear", _linear, holds_logits=True),
    Contender("torch fp32 logits", "linear", _linear_fp32, holds_logits=True),
    Contender("torch.compile", "linear", _compiled(_linear), compiles=True, holds_logits=True),
    Contender("torch.compile fp32 logits", "linear", _compiled(_linear_fp32), compiles=True, holds_logits=True),
    Contender("torch chunked", "linear", _chunked),
    Contender("torch", "logits", _logits, holds_logits=True),
    Contender("torch fp32 logits", "logits", _logits_fp32, holds_logits=True),
    Contender("torch.compile", "logits", _compiled(_logits), compiles=True, holds_logits=True),
    Contender("torch.compile fp32 logits", "logits", _compiled(_logits_fp32), compiles=True, holds_logits=True),
)
