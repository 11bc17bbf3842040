"""Accumulate the gradients of input, classifier and bias from the gradients of chunks of logits."""

from collections.abc import Iterable

import torch
from torch import Tensor

from xent.backends.torch.facts import accumulation_dtype
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.product_sum import ProductSum, kept_dtype
from xent.backends.torch.rows import span
from xent.backends.torch.schedule import Part, Schedule

__all__ = ["Gradients", "no_gradients"]


def no_gradients(linear: Linear) -> list[Tensor]:
    """Return three empty tensors, for the gradients of input, weight and bias."""
    return _completed(linear, (None, None, None))


def _completed(linear: Linear, made: Iterable[Tensor | None]) -> list[Tensor]:
    """Replace None by an empty tensor in the gradients of input, weight and bias."""
    sources = (linear.input, linear.weight, linear.weight if linear.bias is None else linear.bias)
    return [source.new_empty(0) if grad is None else grad for grad, source in zip(made, sources, strict=True)]


class Gradients:
    """The gradients of input, classifier and bias, as far as they are needed, accumulated over chunks."""

    def __init__(self, linear: Linear, schedule: Schedule) -> None:
        """Start with no chunk."""
        self._linear, self._schedule = linear, schedule
        self._needs_input, self._needs_weight, self._needs_bias = linear.needs
        weight = linear.weight
        self._input: Tensor | None = None
        if self._needs_weight:
            chunks = schedule.chunks()
            self._weight = ProductSum(weight.shape, linear.compute, weight.dtype, weight.device, chunks)
        if self._needs_bias:
            self._bias = torch.zeros(weight.shape[0], dtype=accumulation_dtype(linear.compute), device=weight.device)

    def add(self, part: Part, trained: Tensor, grad_logits: Tensor) -> None:
        """Add a part: hidden states (R, D), 0 in rows without a gradient, and the gradient of its logits (R, V)."""
        self.add_to_classifier(part, trained, grad_logits)
        self.add_to_input(part, grad_logits)

    def add_to_classifier(self, part: Part, trained: Tensor, grad_logits: Tensor) -> None:
        """Add a part to the gradients of weight and bias only."""
        if self._needs_weight:
            self._weight.add(grad_logits.t(), trained, part.last)
        if self._needs_bias:
            self._bias += grad_logits.sum(0, dtype=self._bias.dtype)

    def add_to_input(self, part: Part, grad_logits: Tensor) -> None:
        """Write the gradient of a part's hidden states only."""
        if not self._needs_input:
            return
        classifier, source = self._linear.classifier, self._linear.hidden
        fits = part.rows is None and kept_dtype(source.dtype) == grad_logits.dtype
        if fits and part.stop - part.start == source.shape[0]:
            self._input = grad_logits @ classifier
            return
        place = self._memory()
        if fits:
            torch.mm(grad_logits, classifier, out=place[part.start : part.stop])
        else:
            part.put(grad_logits @ classifier, place)

    def of_input(self) -> Tensor | None:
        """Return the gradient of the input after the last part; None if it is not needed."""
        if not self._needs_input:
            return None
        made, shape = self._memory(), self._linear.input.shape
        if self._schedule.left_out is not None:
            made.index_fill_(0, self._schedule.left_out, 0)
        return made if len(shape) == 2 else made.view(shape)

    def _memory(self) -> Tensor:
        """Return the memory of the input's gradient."""
        if self._input is None:
            source = self._linear.hidden
            self._input = torch.empty(source.shape, dtype=kept_dtype(source.dtype), device=source.device)
        return self._input

    def of_classifier(self, vocabulary: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the first `vocabulary` classes of weight and bias; None if they are not needed."""
        bias = self._linear.bias
        return (
            span(self._weight.result(), 0, vocabulary) if self._needs_weight else None,
            self._bias[:vocabulary].to(kept_dtype(bias.dtype)) if self._needs_bias and bias is not None else None,
        )

    def result(self, vocabulary: int) -> list[Tensor]:
        """Return the gradients of input, weight and bias; an empty tensor for each that is not needed."""
        return _completed(self._linear, (self.of_input(), *self.of_classifier(vocabulary)))
