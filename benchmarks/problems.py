"""The tensors of a case, and one call of a loss function on them as a training step would make it.

Setting a call up (fresh logits, gradients set to None) is apart from making it, so that only what a training step pays
for is timed. Imported only by the processes that measure.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.contenders import LossFunction

__all__ = ["LinearProblem", "LogitsProblem", "Problem", "make_problem"]

_SEED = 20240229


class Problem(Protocol):
    """What a measurement needs of a problem: `arguments = set_up()`, then any number of times `call(loss, arguments)`.

    Drop the arguments before the next `set_up`, or two sets of them are alive.
    """

    def set_up(self) -> tuple[Tensor, ...]:
        """Return the arguments of the loss function, with no gradient left from an earlier call."""

    def call(self, loss: LossFunction, arguments: tuple[Tensor, ...]) -> Tensor:
        """Go forward and, if the case has a backward, back with an upstream gradient of 1; return the detached loss."""


def make_problem(case: Case) -> Problem:
    """Make the case's random inputs on its device from a fixed seed, every page of them written."""
    return LinearProblem(case) if case.function == "linear" else LogitsProblem(case)


def _call(loss: LossFunction, arguments: tuple[Tensor, ...], backward: bool) -> Tensor:
    if not backward:
        with torch.no_grad():
            return loss(*arguments)
    value = loss(*arguments)
    value.backward()
    return value.detach()


class LinearProblem:
    """Standard normal hidden states (tokens, hidden) and a classifier (vocabulary, hidden) scaled by hidden ** -0.5.

    The logits then have unit variance.
    """

    def __init__(self, case: Case) -> None:
        """Fill the tensors in place: a temporary would raise the high-water mark of memory before the measurement."""
        generator = torch.Generator(case.device).manual_seed(_SEED)
        dtype = getattr(torch, case.dtype)
        self.case = case
        self.input = torch.empty(case.tokens, case.hidden, dtype=dtype, device=case.device)
        self.input.normal_(generator=generator)
        self.weight = torch.empty(case.vocabulary, case.hidden, dtype=dtype, device=case.device)
        self.weight.normal_(std=case.hidden**-0.5, generator=generator)
        self.target = torch.randint(case.vocabulary, (case.tokens,), generator=generator, device=case.device)
        self.input.requires_grad_(case.backward)
        self.weight.requires_grad_(case.backward)

    def set_up(self) -> tuple[Tensor, ...]:
        """Return (input, weight, target); both leaves have `.grad` None, as after `zero_grad` in training."""
        self.input.grad = self.weight.grad = None
        return self.input, self.weight, self.target

    def call(self, loss: LossFunction, arguments: tuple[Tensor, ...]) -> Tensor:
        """Leave the gradients in `input.grad` and `weight.grad`."""
        return _call(loss, arguments, self.case.backward)


class LogitsProblem:
    """Standard normal logits (tokens, vocabulary) that are, as in a model, the output of an operation and not a leaf.

    That matters to a gradient that takes the place of the logits, which autograd refuses for a leaf.
    """

    def __init__(self, case: Case) -> None:
        """Keep a template: a call may overwrite its logits."""
        generator = torch.Generator(case.device).manual_seed(_SEED)
        self.case = case
        self.template = torch.empty(
            case.tokens, case.vocabulary, dtype=getattr(torch, case.dtype), device=case.device
        ).normal_(generator=generator)
        self.target = torch.randint(case.vocabulary, (case.tokens,), generator=generator, device=case.device)
        self.anchor = torch.zeros((), device=case.device, requires_grad=case.backward)
        self.received: list[Tensor] = []

    def set_up(self) -> tuple[Tensor, ...]:
        """Return (logits, target), the logits a fresh copy of the template."""
        self.received.clear()
        return _Producer.apply(self.anchor, self.template, self.received), self.target

    def call(self, loss: LossFunction, arguments: tuple[Tensor, ...]) -> Tensor:
        """Leave the gradient of the logits in `received`."""
        return _call(loss, arguments, self.case.backward)


class _Producer(torch.autograd.Function):
    """Stands for the model in front of the loss: hands out logits, takes their gradient and keeps it alive."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, template: Tensor, received: list[Tensor]) -> Tensor:
        ctx.received = received
        return template.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.received.append(gradients[0])
        return gradients[0].new_zeros(()), None, None
