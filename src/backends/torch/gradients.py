"""Gathers the gradients that were asked for from the gradients of chunks of logits."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xent.backends.torch.kernels import Kernels
from xent.backends.torch.product_sum import ProductSum, kept_dtype
from xent.backends.torch.schedule import Part, Schedule

if TYPE_CHECKING:
    from xent.backends.torch.linear import Linear

__all__ = ["Gradients", "no_gradients"]


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

    def __init__(self, linear: "Linear", schedule: Schedule, chosen: Kernels) -> None:
        self._linear, self._schedule = linear, schedule
        # Rows without weight that are computed for their statistics.
        self._dead = schedule.facts.dead if schedule.facts.spec.stats else None
        self._needs_input, self._needs_weight, self._needs_bias = linear.needs
        source, weight = linear.input, linear.weight
        if self._needs_input:
            self._input = torch.empty(linear.hidden.shape, dtype=kept_dtype(source.dtype), device=source.device)
        if self._needs_weight:
            chunks = schedule.chunks()
            self._weight = ProductSum(
                weight.shape, linear.compute, weight.dtype, weight.device, chunks, chosen.add_product
            )
        if self._needs_bias:
            wide = torch.float64 if linear.compute == torch.float64 else torch.float32
            self._bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device)

    def begin(self, part: Part, input: Tensor | None, weight: Tensor, bias: Tensor | None) -> None:
        """Take the gradients that the first part has made, those that are asked for."""
        if self._needs_input and input is not None:
            part.put(input, self._input)
        self._weight.begin(weight)
        if self._needs_bias and bias is not None:
            self._bias = bias.to(self._bias.dtype)

    def trained(self, part: Part, hidden: Tensor) -> Tensor:
        """Return the hidden states (R, D) as the weight's gradient may see them."""
        if self._dead is None:
            return hidden
        # Those of dead rows must not reach it, not even as 0 * NaN.
        return hidden.masked_fill(self._dead[part.start : part.stop, None], 0)

    def add(self, part: Part, hidden: Tensor, grad_logits: Tensor) -> None:
        """Take the hidden states (R, D) and the gradient of the logits (R, V) of a part."""
        if self._needs_input:
            self._add_input(part, grad_logits)
        if self._needs_weight:
            self._weight.add(grad_logits.t(), self.trained(part, hidden), part.last)
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
            made[1] = self._weight.result()
        if self._needs_bias and bias is not None:
            made[2] = self._bias.to(kept_dtype(bias.dtype))
        return made

    def _add_input(self, part: Part, grad_logits: Tensor) -> None:
        if part.rows is None and self._input.dtype == grad_logits.dtype:
            torch.mm(grad_logits, self._linear.classifier, out=self._input[part.start : part.stop])
        else:
            part.put(grad_logits @ self._linear.classifier, self._input)
