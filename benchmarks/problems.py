"""The tensors of a case, and one call of a loss function on them as a training step would make it.

Setting a call up (fresh logits, gradients set to None) is apart from making it, so that only what a training step pays
for is timed. Imported only by the processes that measure.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.cases import IGNORE_INDEX, Case
from benchmarks.contenders import LossFunction

__all__ = ["LinearProblem", "LogitsProblem", "Problem", "make_problem"]

_SEED = 20240229


class Problem(Protocol):
    """What a measurement needs of a problem: `arguments = set_up()`, then any number of times `call(loss, arguments)`.

    `target` (tokens,) are the classes, `upstream` (tokens,) the gradient of the rows' losses, None if the loss is
    their mean and its gradient 1.
    """

    target: Tensor
    upstream: Tensor | None

    def set_up(self, in_place: bool = False, fresh: bool = True) -> tuple[Tensor, ...]:
        """Return the arguments of the loss function, with no gradient left from an earlier call.

        `in_place`: the call overwrites its logits; with `fresh` they are as they were at first.
        """

    def clear(self) -> None:
        """Drop the gradients of an earlier call, as `set_up` does."""

    def call(self, loss: LossFunction, arguments: tuple[Tensor, ...]) -> Tensor:
        """Go forward and, if the case has a backward, back from `upstream`; return the detached loss."""


def make_problem(case: Case) -> Problem:
    """Make the case's random inputs on its device from a fixed seed, every page of them written."""
    return LinearProblem(case) if case.function == "linear" else LogitsProblem(case)


def _call(loss: LossFunction, arguments: tuple[Tensor, ...], backward: bool, upstream: Tensor | None) -> Tensor:
    if not backward:
        with torch.no_grad():
            return _first(loss(*arguments))
    value = _first(loss(*arguments))
    value.backward(upstream if upstream is None else upstream.to(value.dtype).view_as(value))
    return value.detach()


def _first(result: Any) -> Tensor:
    """Return the loss of what may also have statistics behind it."""
    return result[0] if isinstance(result, tuple) else result


def _targets(case: Case, generator: torch.Generator) -> Tensor:
    """Random classes (tokens,); of these a random subset, whose size is exactly as asked for, is ignored."""
    target = torch.randint(case.vocabulary, (case.tokens,), generator=generator, device=case.device)
    if case.ignored:
        order = torch.randperm(case.tokens, generator=generator, device=case.device)
        target[order[: round(case.tokens * case.ignored)]] = IGNORE_INDEX
    return target


def _upstream(case: Case, generator: torch.Generator) -> Tensor | None:
    """Return the gradient of the loss: None, which is 1, for a mean; random (tokens,) float32 for one of each row."""
    if case.reduction == "mean":
        return None
    return torch.rand(case.tokens, generator=generator, device=case.device)


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
        self.target = _targets(case, generator)
        self.upstream = _upstream(case, generator)
        self.input.requires_grad_(case.backward and "input" in case.trained)
        self.weight.requires_grad_(case.backward and "weight" in case.trained)

    def set_up(self, in_place: bool = False, fresh: bool = True) -> tuple[Tensor, ...]:
        """Return (input, weight, target), with `.grad` None, as after `zero_grad`; no call overwrites them."""
        self.clear()
        return self.input, self.weight, self.target

    def clear(self) -> None:
        """Drop the gradients of an earlier call."""
        self.input.grad = self.weight.grad = None

    def call(self, loss: LossFunction, arguments: tuple[Tensor, ...]) -> Tensor:
        """Leave the gradients in `input.grad` and `weight.grad`."""
        return _call(loss, arguments, self.case.backward, self.upstream)


class LogitsProblem:
    """Standard normal logits (tokens, vocabulary) that are, as in a model, the output of an operation and not a leaf.

    With `case.batch`, all but the last position of each of its sequences: (batch, tokens / batch, vocabulary).
    """

    def __init__(self, case: Case) -> None:
        """Keep a template: a call in place may overwrite its logits, which are a copy then."""
        generator = torch.Generator(case.device).manual_seed(_SEED)
        shape = (case.batch, case.tokens // case.batch + 1) if case.batch else (case.tokens,)
        self.case = case
        self.template = torch.empty(
            *shape, case.vocabulary, dtype=getattr(torch, case.dtype), device=case.device
        ).normal_(generator=generator)
        if case.batch:
            self.template = self.template[:, :-1]
        self.target = _targets(case, generator).reshape(self.template.shape[:-1])
        self.upstream = _upstream(case, generator)
        self.leaf = self.template.detach().requires_grad_(case.backward)
        self.received: list[Tensor] = []
        self._anchor = torch.zeros((), device=case.device, requires_grad=case.backward)
        self._copy: Tensor | None = None

    def set_up(self, in_place: bool = False, fresh: bool = True) -> tuple[Tensor, ...]:
        """Return (logits, target); for a call in place a copy of the logits, which `fresh` restores."""
        self.clear()
        if not in_place:
            return self.leaf.view_as(self.leaf), self.target
        if self._copy is None or fresh:
            self._copy = self.template.clone() if self._copy is None else self._copy.copy_(self.template)
        return _Producer.apply(self._anchor, self._copy, self.received), self.target

    def clear(self) -> None:
        """Drop the gradient of an earlier call."""
        self.leaf.grad = None
        self.received.clear()

    def call(self, loss: LossFunction, arguments: tuple[Tensor, ...]) -> Tensor:
        """Leave the gradient of the logits where `gradient` finds it."""
        return _call(loss, arguments, self.case.backward, self.upstream)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that the last call has left."""
        return self.received[0] if self.received else self.leaf.grad


class _Producer(torch.autograd.Function):
    """Stands for the model in front of a loss that overwrites its logits, which autograd refuses for a leaf's view."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, logits: Tensor, received: list[Tensor]) -> Tensor:
        ctx.received = received
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.received.append(gradients[0])
        return None, None, None
