"""The tensors of a case on one device, and one call of a loss function on them, as in a training step.

The set-up of a call (fresh logits, gradients set to None) is separate from the call, so that it is not timed. Imported
only by the processes that measure.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import IGNORE_INDEX, Case
from benchmarks.contenders import LossFunction
from benchmarks.truth import Truth

__all__ = ["DivergenceProblem", "LinearProblem", "LogitsProblem", "Problem", "make_problem"]

_SEED = 20240229


class Problem:
    """A problem: `arguments = set_up()`, then any number of times `call(loss, arguments)`.

    `target` (tokens,) are the classes. `upstream` is the upstream gradient: (tokens,) for losses per row, (2, tokens)
    for log-probabilities and entropies, None for a mean, whose upstream gradient is 1.
    """

    target: Tensor
    upstream: Tensor | None = None
    held_bytes = 0
    """Bytes that belong to a call's peak, although they were there before."""

    def __init__(self, case: Case) -> None:
        """Keep the case, and a generator with a fixed seed."""
        self.case = case
        self._generator = torch.Generator(case.device).manual_seed(_SEED)

    def set_up(self, in_place: bool = False, fresh: bool = True) -> tuple[Any, ...]:
        """Return the arguments of the loss function, without gradients of an earlier call.

        `in_place`: the call overwrites its logits; with `fresh` their original values are restored.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Drop the gradients of an earlier call."""

    def call(self, loss: LossFunction, arguments: tuple[Any, ...]) -> Tensor:
        """Run the forward pass and, if the case has one, the backward pass; return the detached loss."""
        return _call(loss, arguments, self.case.backward, self.upstream)

    def errors(self, truth: Truth, result: Tensor) -> dict[str, float]:
        """Return the errors of the last call, whose result this is, as fields of a record."""
        return truth.errors(self, result)

    def _normal(self, *shape: int, std: float = 1.0) -> Tensor:
        """Fill memory in place, because temporary tensors would raise the peak before the measurement."""
        made = torch.empty(*shape, dtype=getattr(torch, self.case.dtype), device=self.case.device)
        return made.normal_(std=std, generator=self._generator)

    def _draw_targets(self) -> None:
        """Draw classes (tokens,), of which exactly the share `case.ignored` is ignored, and the upstream gradient."""
        case, generator = self.case, self._generator
        self.target = torch.randint(case.vocabulary, (case.tokens,), generator=generator, device=case.device)
        if case.ignored:
            order = torch.randperm(case.tokens, generator=generator, device=case.device)
            self.target[order[: round(case.tokens * case.ignored)]] = IGNORE_INDEX
        if case.of_rows:
            several = case.function.endswith("log-probabilities")
            shape = (2, case.tokens) if several else (case.tokens,)
            self.upstream = torch.rand(shape, generator=generator, device=case.device)


def make_problem(case: Case) -> Problem:
    """Create the case's random inputs on its device, with all memory pages written."""
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


class LinearProblem(Problem):
    """Standard normal hidden states (tokens, hidden) and a classifier (vocabulary, hidden) scaled by hidden ** -0.5.

    The logits then have unit variance.
    """

    def __init__(self, case: Case) -> None:
        """Create the tensors."""
        super().__init__(case)
        self.input = self._normal(case.tokens, case.hidden)
        self.weight = self._normal(case.vocabulary, case.hidden, std=case.hidden**-0.5)
        self._draw_targets()
        self.input.requires_grad_(case.backward and "input" in case.trained)
        self.weight.requires_grad_(case.backward and "weight" in case.trained)

    def set_up(self, in_place: bool = False, fresh: bool = True) -> tuple[Any, ...]:
        """Return (input, weight, target), with `.grad` None, as after `zero_grad`. No call overwrites them."""
        self.clear()
        return self.input, self.weight, self.target

    def clear(self) -> None:
        """Drop the gradients of an earlier call."""
        self.input.grad = self.weight.grad = None


class DivergenceProblem(LinearProblem):
    """A student with these tensors, and its teacher: hidden states and classifier, or its most probable classes."""

    def __init__(self, case: Case) -> None:
        """Create the student's tensors, then the teacher's, which get no gradient."""
        super().__init__(case)
        width, k = case.teacher or case.hidden, dict(case.options).get("top_k")
        if k is None:
            self.teacher = self._normal(case.tokens, width), self._normal(case.vocabulary, width, std=width**-0.5)
            return
        options = {"generator": self._generator, "device": case.device}
        ids = torch.rand(case.tokens, case.vocabulary, **options).topk(k, dim=1).indices
        spread = torch.randn(case.tokens, k + 1, **options)
        self.teacher = ids, (2 * spread).log_softmax(1)[:, 1:].contiguous()  # the first is the mass of all others

    def set_up(self, in_place: bool = False, fresh: bool = True) -> tuple[Any, ...]:
        """Return (input, weight, teacher's input, teacher's weight), or for the teacher ids and log-probabilities."""
        return *super().set_up()[:2], *self.teacher


class LogitsProblem(Problem):
    """Standard normal logits (tokens, vocabulary), which are the output of an operation, as in a model, and no leaf.

    With `case.batch`, all but the last position of each sequence: (batch, tokens / batch, vocabulary). `received` has
    the gradient of the last call.
    """

    def __init__(self, case: Case) -> None:
        """Store the original logits; a call in place overwrites a copy."""
        super().__init__(case)
        shape = (case.batch, case.tokens // case.batch + 1) if case.batch else (case.tokens,)
        self.template = self._normal(*shape, case.vocabulary)
        if case.batch:
            self.template = self.template[:, :-1]
        self._draw_targets()
        self.target = self.target.reshape(self.template.shape[:-1])
        self.received: list[Tensor] = []
        self._anchor = torch.zeros((), device=case.device, requires_grad=case.backward)
        self._copy: Tensor | None = None

    def set_up(self, in_place: bool = False, fresh: bool = True) -> tuple[Any, ...]:
        """Return (logits, target); for a call in place a copy of the logits, which `fresh` restores."""
        self.clear()
        logits = self.template
        if in_place:
            if self._copy is None or fresh:
                self._copy = self.template.clone() if self._copy is None else self._copy.copy_(self.template)
            logits = self._copy
        return _Producer.apply(self._anchor, logits, self.received), self.target

    def clear(self) -> None:
        """Drop the gradient of an earlier call."""
        self.received.clear()


class _Producer(torch.autograd.Function):
    """A stand-in for the model. A leaf could not be overwritten, and its gradient would be made contiguous."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, logits: Tensor, received: list[Tensor]) -> Tensor:
        ctx.received = received
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.received.append(gradients[0])
        return None, None, None
