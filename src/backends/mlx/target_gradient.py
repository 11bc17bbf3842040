"""The gradient with respect to class probabilities. The loss is linear in them.

With x, w, e and a as in `xent.cross_entropy`, the divisor D of the reduction, and upstream gradients u of the loss and
n of the statistic nll::

    dL/dq_ic = (u a_i / D (1-e) w_c + n_i) (-log p_ic)      exactly 0 if the first factor is 0

It is computed from the norm of the forward pass and the logits, which a linear loss computes again. MLX evaluates it
only if it is needed.
"""

import mlx.core as mx

from xent.backends.mlx.devices import device_type
from xent.backends.mlx.elementwise import activate
from xent.backends.mlx.facts import Facts
from xent.backends.mlx.kernels import RowFacts
from xent.core.chunks import rows_per_block

__all__ = ["of_block", "placed"]


def of_block(logits: mx.array, facts: RowFacts, norm: mx.array) -> list[mx.array]:
    """Return the gradient of the targets of a block of raw logits (R, V), as a list of consecutive parts (r, V)."""
    step = rows_per_block(logits.shape[1], facts.weight.dtype.size, device_type(), 1)
    made: list[mx.array] = []
    for start in range(0, len(logits), step):
        part, rows = logits[start : start + step], facts.part(start, start + step)
        part = mx.depends(part, made[-1:]) if made else part
        made.append(_of_rows(part, rows, norm[start : start + step]))
    return made


def _of_rows(z: mx.array, facts: RowFacts, norm: mx.array) -> mx.array:
    x, _ = activate(z.astype(facts.weight.dtype), facts, lambda values: values[:, None])
    log_p = (x - norm[:, :1]) - norm[:, 1:]
    factor = (facts.scale * (1 - facts.number("label_smoothing")))[:, None]
    if facts.class_weight is not None:
        factor = factor * facts.class_weight
    if "nll" in facts.upstream:
        factor = factor + facts.upstream["nll"][:, None]
    factor = mx.where(facts.dead[:, None], 0, factor)
    return mx.where(factor == 0, 0, -factor * log_p)


def placed(parts: list[mx.array], facts: Facts) -> mx.array:
    """Return the gradients (N, V) in the order of the targets, from those in the order of rows."""
    made = mx.concatenate(parts)
    if facts.probability_rows is None:
        return made
    # Rows without a target have an arbitrary index and add zeros to that row.
    return mx.zeros_like(made).at[facts.probability_rows].add(made)
