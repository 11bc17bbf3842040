"""The gradient with respect to class probabilities, block by block. The loss is linear in them.

With x, w, e and a as in `xent.cross_entropy`, the divisor D of the reduction, and upstream gradients u of the loss and
n of the statistic nll::

    dL/dq_ic = (u a_i / D (1-e) w_c + n_i) (-log p_ic)      exactly 0 if the first factor is 0

The z-loss and the divisor of "mean" do not depend on q. The steps do not compute this gradient. The backward pass of
such a call computes log p here, from the given logits, or from float32 logits of the hidden states.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from xent.backends.torch.contract import Upstream, wide
from xent.backends.torch.memory import Rows
from xent.backends.torch.prepare import compute_of
from xent.backends.torch.products import Classifier
from xent.core.call import Call, Given, Options, Probabilities
from xent.core.chunks import rows_per_block, rows_per_chunk

__all__ = ["probability_gradient"]


def probability_gradient(call: Call, upstream: Upstream) -> Tensor:
    """Return the gradient of the target of a prepared call, contiguous, in the target's dtype."""
    target, options = call.target, call.options
    assert isinstance(target, Probabilities)
    given, order = target.values, target.order
    vocabulary, acc = given.shape[-1], wide(compute_of(call.source))
    factor = _factors(target, options, upstream, acc)
    weight = 1.0 if options.weight is None else options.weight.to(acc)
    grad = torch.zeros(given.shape, dtype=given.dtype, device=given.device)
    flat = grad.view(-1, vocabulary)
    for start, x in _logits(call, acc):
        rows = slice(start, start + len(x))
        scale = factor[rows, None] * (1 - options.label_smoothing) * weight
        if upstream.nll is not None:
            scale = scale + upstream.nll.to(acc)[rows, None]
        if order is not None:
            scale = scale.masked_fill((order[rows] < 0)[:, None], 0)
        found = _log_softmax(call, x, rows).mul_(-scale).masked_fill_(scale == 0, 0).to(grad.dtype)
        if order is None:
            flat[rows] = found
        else:
            flat.index_add_(0, order[rows].clamp(min=0), found)
    return grad


def _factors(target: Probabilities, options: Options, upstream: Upstream, acc: torch.dtype) -> Tensor:
    """Return u a_i / D, (N,)."""
    weight, order = options.sample_weight, target.order
    count = target.values.shape[:-1].numel() if order is None else len(order)
    if weight is None:
        weight = torch.ones(count, dtype=acc, device=target.values.device)
    if order is not None:
        weight = weight.masked_fill(order < 0, 0)
    if upstream.loss is None:
        return torch.zeros_like(weight)
    if options.reduction == "mean":
        given = options.normalizer
        divisor = weight.sum() if given is None else torch.zeros((), dtype=acc, device=weight.device) + given
        weight = torch.where(divisor == 0, 0, weight / divisor)
    factors: Tensor = (weight * upstream.loss.to(acc).reshape(-1)).masked_fill(weight == 0, 0)
    return factors


def _log_softmax(call: Call, z: Tensor, rows: slice) -> Tensor:
    """Return log p (R, V) of raw logits, which are overwritten."""
    scale, cap, temperature = call.activation
    x = z.mul_(scale)
    if cap is not None:
        x = x.div_(cap).tanh_().mul_(cap)
    if temperature is not None:
        x = x.div_(temperature[rows, None])
    return torch.log_softmax(x, -1)


def _logits(call: Call, acc: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, new logits (R, V) in `acc`) of all rows."""
    source = call.source
    if isinstance(source, Given):
        step = rows_per_block(source.logits.shape[-1], acc.itemsize, source.logits.device.type, torch.get_num_threads())
        for start, block in Rows(source.logits).blocks(step):
            yield start, block.to(acc, copy=True)
        return
    made = Classifier(source, len(source.weight))
    count, device = len(made.hidden), source.weight.device
    step = max(min(rows_per_chunk(count, made.columns, acc.itemsize, source.workspace, device.type, False), count), 1)
    for start in range(0, count, step):
        hidden = made.hidden[start : start + step].to(made.compute)
        logits = torch.empty(len(hidden), made.columns, dtype=acc, device=device)
        made.write_logits(hidden, logits)
        yield start, logits[:, : made.classes]
