"""The gradients of `linear_cross_entropy` from slices of classes, where chunks of rows would be too many to add up.

A slice has some classes of all rows. Its part of the classifier's gradient is one product, rounded once: nothing is
added up, and nothing but the logits of the slice takes memory. The price is a fourth product: the norm of a row has to
be known before the gradient of any of its logits, so that they are all made twice.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xent.backends.torch.gradients import no_gradients
from xent.backends.torch.kernels import Kernels
from xent.backends.torch.product_sum import ProductSum, kept_dtype
from xent.backends.torch.results import Results
from xent.backends.torch.schedule import Schedule

if TYPE_CHECKING:
    from xent.backends.torch.linear import Linear

__all__ = ["gradients"]


def gradients(linear: "Linear", chosen: Kernels, schedule: Schedule, norm: Tensor, classes: int) -> list[Tensor]:
    """Return the gradients of input, weight and bias from the norm (2, N) of all rows, `classes` at a time."""
    part, facts = schedule.whole(), schedule.facts
    norm = schedule.ordered(norm)
    hidden = part.take(linear.hidden).to(linear.compute)
    weight = linear.classifier
    assert facts.target is not None
    target_logits = chosen.target_logits(hidden, weight, linear.classifier_bias, facts.target[: part.stop])

    needs_input, _, needs_bias = linear.needs
    made = no_gradients(linear)
    made[1] = linear.weight.new_empty(linear.weight.shape, dtype=kept_dtype(linear.weight.dtype))
    if needs_bias and linear.bias is not None:
        made[2] = linear.bias.new_empty(linear.bias.shape, dtype=kept_dtype(linear.bias.dtype))
    slices = range(0, len(weight), classes)
    input_sum = ProductSum(hidden.shape, linear.compute, linear.input.dtype, hidden.device, len(slices))
    memory = torch.empty(len(hidden) * classes, dtype=linear.compute, device=hidden.device)
    for first in slices:
        here = slice(first, min(first + classes, len(weight)))
        shape = len(hidden), here.stop - first
        logits = memory[: math.prod(shape)].view(shape)
        linear.write_logits(hidden, logits, here)
        run = chosen.row_pass(facts.of_classes(first, here.stop), Results(facts.weight, norm))
        run.backward(logits, 0, logits, target_logits)
        if made[1].dtype == linear.compute:
            torch.mm(logits.t(), hidden, out=made[1][here])
        else:
            made[1][here] = logits.t() @ hidden
        if needs_bias:
            made[2][here] = logits.sum(0, dtype=torch.float32)
        if needs_input:
            input_sum.add(logits, weight[here], here.stop == len(weight))
    if needs_input:
        made[0] = linear.input.new_empty(linear.hidden.shape, dtype=kept_dtype(linear.input.dtype))
        part.put(input_sum.result(), made[0])
        if schedule.left_out is not None:
            made[0].index_fill_(0, schedule.left_out, 0)
        made[0] = made[0].view(linear.input.shape)
    return made
