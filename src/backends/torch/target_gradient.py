"""The gradient with respect to class probabilities, block by block. The loss is linear in them.

With x, w, e and a as in `xent.cross_entropy`, the divisor D of the reduction, and upstream gradients u of the loss and
n of the statistic nll::

    dL/dq_ic = (u a_i / D (1-e) w_c + n_i) (-log p_ic)      exactly 0 if the first factor is 0

The z-loss and the divisor of "mean" do not depend on q. The kernels do not compute this gradient. The backward pass of
such a call computes log p here; a linear loss computes it from float32 logits.
"""

import torch
from torch import Tensor

from xent.backends.torch.activation import activate
from xent.backends.torch.facts import Facts, gather_facts
from xent.backends.torch.job import Upstream
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options
from xent.backends.torch.rows import Rows
from xent.core.chunks import rows_per_block

__all__ = ["of_linear", "of_logits"]


def of_logits(upstream: Upstream, logits: Tensor, options: Options) -> Tensor:
    """Return the gradient of the target for logits (..., V), contiguous, in the target's dtype."""
    facts = _facts(upstream, logits.shape[-1], logits.dtype, options)
    made = options.target.new_empty(options.target.shape)
    grad, step = made.view(len(facts.scale), facts.vocabulary), _rows_per_block(facts, logits.device)
    for start, block in Rows(logits).blocks(step):
        grad[start : start + len(block)] = _block(facts, block, start)
    return made


def of_linear(upstream: Upstream, linear: Linear, options: Options) -> Tensor:
    """Return the gradient of the target for hidden states and a classifier, computed from chunks of logits."""
    vocabulary, device = len(linear.weight), linear.weight.device
    facts = _facts(upstream, vocabulary, linear.compute, options, linear.shift)
    made = options.target.new_zeros(options.target.shape)
    grad, count = made.view(len(facts.scale), vocabulary), len(linear.hidden)
    wide, padded = facts.scale.dtype, linear.padded
    step = max(min(linear.rows_per_chunk(wide.itemsize, False), count), 1)
    room = torch.empty(step, linear.columns, dtype=wide, device=device)
    for first in range(0, count, step):
        hidden = linear.hidden[first : first + step].to(linear.compute)
        logits = room[: len(hidden)]
        padded.write_logits(hidden, logits)
        for start, block in Rows(logits[:, :vocabulary]).blocks(_rows_per_block(facts, device)):
            rows = slice(first + start, first + start + len(block))
            found = _block(facts, block, rows.start).to(grad.dtype)
            if facts.probability_rows is None:
                grad[rows] = found
            else:
                # Rows without a target have an arbitrary index and add zeros to that row.
                grad.index_add_(0, facts.probability_rows[rows], found)
    return made


def _facts(upstream: Upstream, vocabulary: int, dtype: torch.dtype, options: Options, shift: int = 0) -> Facts:
    quiet = options._replace(spec=options.spec.without_stats())
    return gather_facts(quiet, vocabulary, dtype, shift, upstream)


def _rows_per_block(facts: Facts, device: torch.device) -> int:
    return rows_per_block(facts.vocabulary, facts.scale.itemsize, device.type, torch.get_num_threads())


def _block(facts: Facts, logits: Tensor, start: int) -> Tensor:
    """Return the gradient (R, V) of the targets of R rows from `start` on, in the accumulation dtype."""
    spec, rows = facts.spec, slice(start, start + len(logits))
    x = logits.to(facts.scale.dtype, copy=True)
    log_p = torch.log_softmax(activate(x, spec, None if facts.bend is None else facts.bend[rows]), -1)
    factor = facts.scale[rows, None] * (1 - spec.label_smoothing)
    if facts.class_weight is not None:
        factor = factor * facts.class_weight
    if facts.upstream is not None and facts.upstream.nll is not None:
        factor = factor + facts.upstream.nll[rows, None]
    if facts.dead is not None:
        factor = factor.masked_fill(facts.dead[rows, None], 0)
    return log_p.mul_(-factor).masked_fill_(factor == 0, 0)
