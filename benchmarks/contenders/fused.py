"""Fused cross entropies of other projects, called as their documentation recommends.

Liger-Kernel overwrites its logits with the gradient, and quack has an option for it; their entries say so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.cases import Case
from benchmarks.contenders.entry import Absent, Contender, LossFunction

__all__ = ["CONTENDERS", "find_peer", "refuse_cpu"]

_QUACK_CHUNKS = (2048, 4096, 8192)


def find_peer(module: str, name: str) -> Callable[..., Any]:
    """Import a function, or raise Absent with the reason."""
    package = module.partition(".")[0]
    try:
        function: Callable[..., Any] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if missing.partition(".")[0] == package:
            raise Absent(f"{package} is not installed") from None
        raise Absent(f"{package} needs {missing}, which is not installed") from None
    except Exception as error:
        raise Absent(f"{module}.{name} does not import: {type(error).__name__}: {error}") from None
    return function


def refuse_cpu(case: Case, name: str) -> None:
    """Raise Absent on a CPU."""
    if case.device == "cpu":
        raise Absent(f"{name} has no kernels for the CPU")


def _flat(case: Case, function: LossFunction) -> LossFunction:
    """Flatten a batch of sequences for a function of rows."""
    if not case.batch:
        return function
    return lambda logits, target: function(logits.flatten(0, -2), target.flatten())


def _liger_linear(case: Case) -> LossFunction:
    function = find_peer("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    refuse_cpu(case, "Liger-Kernel")
    return partial(function, reduction=case.reduction)


def _liger_logits(case: Case) -> LossFunction:
    function = find_peer("liger_kernel.transformers.functional", "liger_cross_entropy")
    refuse_cpu(case, "Liger-Kernel")
    return _flat(case, partial(function, reduction=case.reduction))


def _cce_linear(case: Case) -> LossFunction:
    function = find_peer("cut_cross_entropy", "linear_cross_entropy")
    refuse_cpu(case, "Cut Cross Entropy")
    return partial(function, reduction=case.reduction)


def _quack_linear(chunk_size: int) -> Callable[[Case], LossFunction]:
    def make(case: Case) -> LossFunction:
        function = find_peer("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
        refuse_cpu(case, "quack")
        return partial(function, reduction=case.reduction, chunk_size=chunk_size)

    return make


def _quack_logits(inplace: bool) -> Callable[[Case], LossFunction]:
    def make(case: Case) -> LossFunction:
        function = find_peer("quack.cross_entropy", "cross_entropy")
        refuse_cpu(case, "quack")
        return _flat(case, partial(function, reduction=case.reduction, inplace_backward=inplace))

    return make


CONTENDERS: tuple[Contender, ...] = (
    Contender("Liger", "linear", _liger_linear),
    Contender("CCE", "linear", _cce_linear),
    *(Contender(f"quack {chunk_size}", "linear", _quack_linear(chunk_size)) for chunk_size in _QUACK_CHUNKS),
    Contender("Liger in place", "logits", _liger_logits, in_place=True),
    Contender("quack", "logits", _quack_logits(inplace=False)),
    Contender("quack in place", "logits", _quack_logits(inplace=True), in_place=True),
)
