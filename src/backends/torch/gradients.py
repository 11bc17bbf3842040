"""Gathers the gradients that were asked for from the gradients of chunks of logits."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xent.backends.torch.kernels import Exponentials, Factors
from xent.backends.torch.product_sum import ProductSum, kept_dtype
from xent.backends.torch.schedule import Part, Schedule

if TYPE_CHECKING:
    from xent.backends.torch.linear import Linear

__all__ = ["Gradients", "no_gradients"]

_WIDE = 4096  # columns, from which on products are made in halves, of whole units
_UNIT = 128


def no_gradients(linear: "Linear") -> list[Tensor]:
    """Return an empty tensor for each of the gradients of input, weight and bias."""
    weight = linear.weight
    return [
        linear.input.new_empty(0),
        weight.new_empty(0),
        (weight if linear.bias is None else linear.bias).new_empty(0),
    ]


class Gradients:
    """The gradients of input, classifier and bias, added up over chunks."""

    def __init__(self, linear: "Linear", schedule: Schedule, exponentials: Exponentials | None = None) -> None:
        """Begin with nothing; `exponentials` made what comes with factors."""
        self._linear, self._schedule, self._exponentials = linear, schedule, exponentials
        # Those of weight 0 may be computed for their statistics.
        self._dead = schedule.facts.dead if schedule.facts.spec.stats else None
        self._needs_input, self._needs_weight, self._needs_bias = linear.needs
        source, weight = linear.input, linear.weight
        if self._needs_input:
            self._input = torch.empty(linear.hidden.shape, dtype=kept_dtype(source.dtype), device=source.device)
        if self._needs_weight:
            chunks = schedule.chunks()
            self._weight = ProductSum(weight.shape, linear.compute, weight.dtype, weight.device, chunks)
        self._at_target: Tensor | None = None
        """(N,) the gradient of each row's target, in the call's order, where products were made without."""
        if self._needs_bias:
            wide = torch.float64 if linear.compute == torch.float64 else torch.float32
            self._bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device)

    def begin(
        self, part: Part, input: Tensor | None, weight: Tensor, bias: Tensor | None, factors: Factors | None = None
    ) -> None:
        """Take the gradients that the first part has made, those that are asked for; `input` without its factors."""
        if input is not None and factors is not None:
            self._put_scaled(part, input, factors, slice(None))
        elif input is not None:
            part.put(input, self._input)
        self._weight.begin(weight)
        self._keep_targets(part, factors)
        if self._needs_bias and bias is not None:
            self._bias = bias.to(self._bias.dtype)

    def trained(self, part: Part, hidden: Tensor, factors: Factors | None = None) -> Tensor:
        """Return the hidden states (R, D) as the weight's gradient may see them, times the scale of the factors.

        `hidden` is written to where it is a copy. Else scaled ones lie in memory that the part's gradient will take.
        """
        linear, rows = self._linear, slice(part.start, part.stop)
        copied = part.rows is not None or linear.input.dtype != linear.compute
        if factors is not None and self._exponentials is not None:
            memory = hidden
            if not copied:
                memory = self._input[rows] if self._needs_input else hidden.new_empty(hidden.shape)
            self._exponentials.scale_rows(hidden, factors, memory)
            return memory
        dead = part.idle if self._dead is None else self._dead[rows]
        if dead is None:
            return hidden
        # Those of dead rows must not reach it, not even as 0 * NaN.
        return hidden.masked_fill_(dead[:, None], 0) if copied else hidden.masked_fill(dead[:, None], 0)

    def add(self, part: Part, hidden: Tensor, grad_logits: Tensor, factors: Factors | None = None) -> None:
        """Take the hidden states (R, D) and the gradient of the logits (R, V) of a part, but for its factors."""
        if self._needs_weight:
            self._weight.add(grad_logits.t(), self.trained(part, hidden, factors), part.last)
            self._keep_targets(part, factors)
        if self._needs_input and factors is not None:
            self._add_scaled(part, grad_logits, factors)
        elif self._needs_input:
            self._add_input(part, grad_logits)
        if self._needs_bias:
            self._bias += grad_logits.sum(0, dtype=self._bias.dtype)

    def result(self) -> list[Tensor]:
        """Return the gradients of input, weight and bias; an empty tensor for one that nobody asked for."""
        made, bias = no_gradients(self._linear), self._linear.bias
        if self._needs_input:
            if self._schedule.left_out is not None:
                self._input.index_fill_(0, self._schedule.left_out, 0)
            made[0] = self._input.view(self._linear.input.shape)
        if self._needs_weight:
            if self._at_target is not None and self._exponentials is not None:
                self._exponentials.add_targets(self._weight.unrounded(), self._linear.hidden, self._at_target)
            made[1] = self._weight.result()
        if self._needs_bias and bias is not None:
            made[2] = self._bias.to(kept_dtype(bias.dtype))
        return made

    def _keep_targets(self, part: Part, factors: Factors | None) -> None:
        if factors is not None:
            if self._at_target is None:
                self._at_target = factors.at_target.new_zeros(len(self._linear.hidden))
            part.put(factors.at_target, self._at_target)

    def _add_input(self, part: Part, grad_logits: Tensor) -> None:
        if part.rows is None and self._input.dtype == grad_logits.dtype:
            torch.mm(grad_logits, self._linear.classifier, out=self._input[part.start : part.stop])
        else:
            part.put(grad_logits @ self._linear.classifier, self._input)

    def _add_scaled(self, part: Part, exponentials: Tensor, factors: Factors) -> None:
        """Add the same of exponentials: float32 products, of which factors make gradients, each rounded once.

        A product takes no more memory than a rounded one would, where that has thousands of columns.
        """
        linear, width = self._linear, self._input.shape[1]
        step = width if width < _WIDE else -(-width // 2 // _UNIT) * _UNIT
        for first in range(0, width, step):
            columns = slice(first, min(first + step, width))
            shape = torch.Size((len(exponentials), columns.stop - first))
            product = ProductSum(shape, linear.compute, linear.input.dtype, exponentials.device, chunks=None)
            product.add(exponentials, linear.classifier[:, columns], last=False)
            self._put_scaled(part, product.unrounded(), factors, columns)

    def _put_scaled(self, part: Part, product: Tensor, factors: Factors, columns: slice) -> None:
        target, exponentials = self._schedule.facts.target, self._exponentials
        assert exponentials is not None
        assert target is not None
        place = self._input if part.rows is not None else self._input[part.start : part.stop]
        exponentials.finish_input(product, factors, target[part.start : part.stop], columns, place, part.rows)
