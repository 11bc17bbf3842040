"""Who is measured: one table, one entry per implementation and function.

An entry's `make` imports its framework, because only the process that measures it should pay for that, and returns the
function to measure: `loss(input, weight, target)` for "linear", `loss(logits, target)` for "logits", where target has
shape (tokens,) and int64 classes and the mean is taken. What cannot run on this machine raises `Absent` with the
reason, which is shown in the table in place of a number.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.cases import Case, Function

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CONTENDERS", "Absent", "Contender", "LossFunction", "find_contender"]

LossFunction = Callable[..., "Tensor"]


class Absent(Exception):
    """A contender that this machine cannot run; the message is the reason."""


@dataclass(frozen=True)
class Contender:
    """One implementation of one of the two functions.

    `compiles`: the first call at a new shape compiles, so the warm-up has the full size. `in_place`: the gradient takes
    the place of the logits, so no memory has to exist for it. `holds_logits`: the full logits and as much again for
    their gradient are alive at one time, which a machine may not have the memory for.
    """

    name: str
    function: Function
    make: Callable[[Case], LossFunction]
    compiles: bool = False
    in_place: bool = False
    holds_logits: bool = False

    def memory_needed(self, case: Case) -> int:
        """Estimate roughly, from above, the bytes that a call takes, so that no machine starts to swap."""
        logits_sized = 3 if self.holds_logits and case.backward else 1 if self.holds_logits else 0
        return logits_sized * case.logits_bytes + 2 * case.gradient_bytes


def _torch_linear(case: Case) -> LossFunction:
    from torch.nn import functional

    def loss(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(input, weight), target)

    return loss


def _torch_logits(case: Case) -> LossFunction:
    from torch.nn import functional

    return functional.cross_entropy


def _compiled(make: Callable[[Case], LossFunction]) -> Callable[[Case], LossFunction]:
    def make_compiled(case: Case) -> LossFunction:
        import torch

        compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++", "cl"]
        if case.device == "cpu" and not any(map(shutil.which, compilers)):
            raise Absent(f"needs a C++ compiler, and none of {', '.join(compilers)} was found")
        return torch.compile(make(case), dynamic=False)

    return make_compiled


def _torch_chunked(case: Case) -> LossFunction:
    import torch
    from torch.nn import functional

    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Absent(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()

    def loss(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return functional.linear_cross_entropy(input, weight, target, options=options)

    return loss


def _xent_linear(case: Case) -> LossFunction:
    import xent

    return xent.linear_cross_entropy


def _xent_logits(case: Case) -> LossFunction:
    import xent

    return xent.cross_entropy


def _xent_logits_in_place(case: Case) -> LossFunction:
    import xent

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return xent.cross_entropy(logits, target, inplace=True)

    return loss


CONTENDERS: tuple[Contender, ...] = (
    Contender("torch", "linear", _torch_linear, holds_logits=True),
    Contender("torch.compile", "linear", _compiled(_torch_linear), compiles=True, holds_logits=True),
    Contender("torch chunked", "linear", _torch_chunked),
    Contender("xent", "linear", _xent_linear),
    Contender("torch", "logits", _torch_logits, holds_logits=True),
    Contender("torch.compile", "logits", _compiled(_torch_logits), compiles=True, holds_logits=True),
    Contender("xent", "logits", _xent_logits),
    Contender("xent inplace", "logits", _xent_logits_in_place, in_place=True),
)


def find_contender(function: Function, name: str) -> Contender:
    """Look up the entry of the table for this function and name; KeyError if there is none."""
    for contender in CONTENDERS:
        if (contender.function, contender.name) == (function, name):
            return contender
    raise KeyError(f"no contender {name!r} for function {function!r}")
