"""The gradients of `linear_cross_entropy` from slices of classes, where chunks of rows would be too many to add up.

A slice has some classes of all rows. Its part of the classifier's gradient is one product, rounded once, and needs no
sum; the input's gradient is added up instead, in float32, which is smaller. The price is a fourth product: the norm of
a row has to be known before the gradient of any of its logits, so that they are all made twice, those of ignored rows
once. The host waits for the number of rows: in forward while the device looks for the norm, in backward for nothing.
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
    """Return the gradients of input, weight and bias from the norm (2, N) of all N rows.

    `classes` of N rows are in memory at one time, or as many more of those rows that are computed.
    """
    part, facts = schedule.whole(), schedule.facts
    norm = schedule.ordered(norm)
    hidden = part.take(linear.hidden).to(linear.compute)
    if part.idle is not None:
        hidden = hidden.masked_fill(part.idle[:, None], 0)
    weight = linear.classifier
    assert facts.target is not None
    target_logits = chosen.target_logits(hidden, weight, linear.classifier_bias, facts.target[: part.stop])

    needs_input, _, needs_bias = linear.needs
    made = no_gradients(linear)
    made[1] = linear.weight.new_empty(linear.weight.shape, dtype=kept_dtype(linear.weight.dtype))
    if needs_bias and linear.bias is not None:
        made[2] = linear.bias.new_empty(linear.bias.shape, dtype=kept_dtype(linear.bias.dtype))
    classes = min(classes * max(len(linear.hidden) // max(len(hidden), 1), 1), len(weight))
    slices = range(0, len(weight), classes)
    input_sum = ProductSum(hidden.shape, linear.compute, linear.input.dtype, hidden.device, chunks=None)
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
            product = ProductSum(made[1][here].shape, linear.compute, linear.weight.dtype, hidden.device, chunks=1)
            product.add(logits.t(), hidden, last=False)
            made[1][here] = product.result()
        if needs_bias:
            made[2][here] = logits.sum(0, dtype=torch.float32)
        if needs_input:
            input_sum.add(logits, weight[here], here.stop == len(weight))
    if needs_input:
        computed = input_sum.result()
        made[0] = computed if part.rows is None else computed.new_empty(linear.hidden.shape)
        if part.rows is not None:
            part.put(computed, made[0])
        if schedule.left_out is not None:
            made[0].index_fill_(0, schedule.left_out, 0)
        made[0] = made[0].view(linear.input.shape)
    return made
