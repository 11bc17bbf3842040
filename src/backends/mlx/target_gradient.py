"""The gradient with respect to class probabilities. The loss is linear in them.

With x, w, e and a as in `xent.cross_entropy`, the divisor D of the reduction, and upstream gradients u of the loss and
n of the statistic nll::

    dL/dq_ic = (u a_i / D (1-e) w_c + n_i) (-log p_ic)      exactly 0 if the first factor is 0

It is computed from the norm of the forward pass and the logits, which a linear loss computes again. MLX evaluates it
only if it is needed.
"""

import mlx.core as mx

from xent.backends.mlx.devices import device_type
from xent.backends.mlx.kernels import RowFacts
from xent.core.chunks import rows_per_block

__all__ = ["of_block"]


def of_block(logits: mx.array, facts: RowFacts, norm: mx.array) -> mx.array:
    """Return the gradient (R, V) of the targets of a block of raw logits (R, V)."""
    step = rows_per_block(logits.shape[1], facts.weight.dtype.size, device_type(), 1)
    made: list[mx.array] = []
    for start in range(0, len(logits), step):
        part, rows = logits[start : start + step], facts.part(start, start + step)
        part = mx.depends(part, made[-1:]) if made else part
        made.append(_of_rows(part, rows, norm[start : start + step]))
    return made[0] if len(made) == 1 else mx.concatenate(made)


def _of_rows(z: mx.array, facts: RowFacts, norm: mx.array) -> mx.array:
    x, _ = facts.activate(z)
    log_p = (x - norm[:, :1]) - norm[:, 1:]
    factor = (facts.scale * (1 - facts.number("label_smoothing")))[:, None]
    if facts.class_weight is not None:
        factor = factor * facts.class_weight
    if "nll" in facts.upstream:
        factor = factor + facts.upstream["nll"][:, None]
    factor = mx.where(facts.dead[:, None], 0, factor)
    return mx.where(factor == 0, 0, -factor * log_p)
