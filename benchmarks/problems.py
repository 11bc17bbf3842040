"""The tensors of a case on one device, and one call of a loss function on them, as in a training step.

The set-up of a call (fresh logits, gradients set to None) is separate from the call, so that it is not timed. Imported
only by the processes that measure.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.cases import IGNORE_INDEX, Case
from benchmarks.contenders import LossFunction
from benchmarks.ranks import Shards
from benchmarks.truth import Truth

__all__ = ["DivergenceProblem", "LinearProblem", "LogitsProblem", "Problem", "make_problem"]

_SEED = 20240229


class Problem(Protocol):
    """A problem: `arguments = set_up()`, then any number of times `call(loss, arguments)`.

    `target` (tokens,) are the classes. `upstream` is the upstream gradient: (tokens,) for losses per row, (2, tokens)
    for log-probabilities and entropies, None for a mean, whose upstream gradient is 1.
    """

    case: Case
    target: Tensor
    upstream: Tensor | None

    def set_up(self, in_place: bool = False, fresh: bool = True) -> tuple[Tensor, ...]:
        """Return the arguments of the loss function, without gradients of an earlier call.

        `in_place`: the call overwrites its logits; with `fresh` their original values are restored.
        """

    def clear(self) -> None:
        """Drop the gradients of an earlier call, as `set_up` does."""

    def errors(self, truth: Truth, result: Tensor) -> dict[str, float]:
        """Return the errors of the last call, whose result this is, as fields of a record."""

    def call(self, loss: LossFunction, arguments: tuple[Tensor, ...]) -> Tensor:
        """Run the forward pass and, if the case has one, the backward pass; return the detached loss."""


def make_problem(case: Case) -> Problem:
    """Create the case's random inputs on its device from a fixed seed, with all memory pages written."""
    if case.function == "sharded":
        return Shards(case)
    if case.function == "linear divergence":
        return DivergenceProblem(case)
    return LinearProblem(case) if case.is_linear else LogitsProblem(case)


def _call(loss: LossFunction, arguments: tuple[Tensor, ...], backward: bool, upstream: Tensor | None) -> Tensor:
    if not backward:
        with torch.no_grad():
            return _results(loss(*arguments))[0]
    results = _results(loss(*arguments))
    if upstream is None or upstream.dim() == 1:
        results = results[:1]
    gradients = [None] if upstream is None else [*upstream.view(-1, upstream.shape[-1])]
    pairs = list(zip(results, gradients, strict=False))  # some contenders have no entropy
    given = [None if grad is None else grad.to(value.dtype).view_as(value) for value, grad in pairs]
    torch.autograd.backward([value for value, _ in pairs], given)
    return results[0].detach()


def _results(result: Any) -> tuple[Tensor, ...]:
    """Return (loss, statistics ...) or (log-probabilities, entropies)."""
    return result if isinstance(result, tuple) else (result,)


def _targets(case: Case, generator: torch.Generator) -> Tensor:
    """Return random classes (tokens,), of which a random subset of exactly the requested size is ignored."""
    target = torch.randint(case.vocabulary, (case.tokens,), generator=generator, device=case.device)
    if case.ignored:
        order = torch.randperm(case.tokens, generator=generator, device=case.device)
        target[order[: round(case.tokens * case.ignored)]] = IGNORE_INDEX
    return target


def _upstream(case: Case, generator: torch.Generator) -> Tensor | None:
    """Return the upstream gradient: None, which means 1, for a mean; random float32 for results per row."""
    if not case.of_rows:
        return None
    several = case.function.endswith("log-probabilities")
    return torch.rand((2, case.tokens) if several else case.tokens, generator=generator, device=case.device)


class LinearProblem:
    """Standard normal hidden states (tokens, hidden) and a classifier (vocabulary, hidden) scaled by hidden ** -0.5.

    The logits then have unit variance.
    """

    def __init__(self, case: Case) -> None:
        """Fill the tensors in place, because temporary tensors would raise the peak before the measurement."""
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
        """Return (input, weight, target), with `.grad` None, as after `zero_grad`. No call overwrites them."""
        self.clear()
        return self.input, self.weight, self.target

    def clear(self) -> None:
        """Drop the gradients of an earlier call."""
        self.input.grad = self.weight.grad = None

    def call(self, loss: LossFunction, arguments: tuple[Tensor, ...]) -> Tensor:
        """Leave the gradients in `input.grad` and `weight.grad`."""
        return _call(loss, arguments, self.case.backward, self.upstream)

    def errors(self, truth: Truth, result: Tensor) -> dict[str, float]:
        """Return the errors of the last call."""
        return truth.errors(self, result)


class DivergenceProblem(LinearProblem):
    """A student with these tensors, and its teacher: hidden states and classifier, or its most probable classes."""

    def __init__(self, case: Case) -> None:
        """Create the student's tensors, then the teacher's, which get no gradient."""
        super().__init__(case)
        generator = torch.Generator(case.device).manual_seed(_SEED + 1)
        width, dtype = case.teacher or case.hidden, getattr(torch, case.dtype)
        self.top_k = dict(case.options).get("top_k")
        if self.top_k is None:
            self.teacher = (
                torch.empty(case.tokens, width, dtype=dtype, device=case.device).normal_(generator=generator),
                torch.empty(case.vocabulary, width, dtype=dtype, device=case.device).normal_(
                    std=width**-0.5, generator=generator
                ),
            )
            return
        scores = torch.rand(case.tokens, case.vocabulary, generator=generator, device=case.device)
        ids = scores.topk(self.top_k, dim=1).indices
        spread = torch.randn(case.tokens, self.top_k + 1, generator=generator, device=case.device)
        self.teacher = ids, (2 * spread).log_softmax(1)[:, 1:].contiguous()  # the first is the mass of all others

    def set_up(self, in_place: bool = False, fresh: bool = True) -> tuple[Tensor, ...]:
        """Return (input, weight, teacher's input, teacher's weight), or for the teacher ids and log-probabilities."""
        self.clear()
        return self.input, self.weight, *self.teacher


class LogitsProblem:
    """Standard normal logits (tokens, vocabulary), which are the output of an operation, as in a model, and no leaf.

    With `case.batch`, all but the last position of each sequence: (batch, tokens / batch, vocabulary).
    """

    def __init__(self, case: Case) -> None:
        """Store the original logits; a call in place overwrites a copy."""
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
        if not in_place and not self.case.batch:
            return self.leaf.view_as(self.leaf), self.target
        if not in_place:  # PyTorch would make the gradient of a leaf with gaps contiguous
            return _Producer.apply(self._anchor, self.template, self.received), self.target
        if self._copy is None or fresh:
            self._copy = self.template.clone() if self._copy is None else self._copy.copy_(self.template)
        return _Producer.apply(self._anchor, self._copy, self.received), self.target

    def clear(self) -> None:
        """Drop the gradient of an earlier call."""
        self.leaf.grad = None
        self.received.clear()

    def call(self, loss: LossFunction, arguments: tuple[Tensor, ...]) -> Tensor:
        """Run the call; `gradient` returns the gradient of the logits."""
        return _call(loss, arguments, self.case.backward, self.upstream)

    def errors(self, truth: Truth, result: Tensor) -> dict[str, float]:
        """Return the errors of the last call."""
        return truth.errors(self, result)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of the last call."""
        return self.received[0] if self.received else self.leaf.grad


class _Producer(torch.autograd.Function):
    """A stand-in for the model, for logits that must not be a leaf or a view of one: in place, or with gaps."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, logits: Tensor, received: list[Tensor]) -> Tensor:
        ctx.received = received
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.received.append(gradients[0])
        return None, None, None
