"""PyTorch: unfused from logits in their own dtype and in float32, both compiled, and its chunked operator."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.cases import Case
from benchmarks.contenders.entry import Absent, Contender, LossFunction

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CONTENDERS"]


def _linear(case: Case) -> LossFunction:
    from torch.nn import functional

    def loss(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(input, weight), target, reduction=case.reduction)

    return loss


def _linear_fp32(case: Case) -> LossFunction:
    from torch.nn import functional

    def loss(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(input, weight).float(), target, reduction=case.reduction)

    return loss


def _logits(case: Case) -> LossFunction:
    from torch.nn import functional

    return partial(functional.cross_entropy, reduction=case.reduction)


def _logits_fp32(case: Case) -> LossFunction:
    from torch.nn import functional

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float(), target, reduction=case.reduction)

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
