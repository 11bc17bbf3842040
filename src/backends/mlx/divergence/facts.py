"""Data of each row of a divergence in MLX that does not depend on logits."""

import os
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from xent.backends.mlx.divergence.rows import KnownClasses
from xent.backends.mlx.facts import accumulation_dtype
from xent.backends.mlx.tracing import is_traced
from xent.core.arrays import dtype_name
from xent.core.teachers import DivergenceCall, LinearLogits, TopKTeacher, mass_tolerance

__all__ = ["DivergenceFacts", "gather_facts", "known_classes"]


@dataclass(frozen=True, eq=False)
class DivergenceFacts:
    """N rows; all in the accumulation dtype."""

    weight: mx.array
    """(N,) a_i; NaN in rows with invalid teacher values."""
    scale: mx.array
    """(N,) gradient factor: a_i, divided by the divisor for "mean", times the upstream gradient if it is known."""
    dead: mx.array
    """(N,) bool: rows whose loss and gradient are exactly 0."""
    idle: mx.array
    """(N,) bool: dead rows of which nothing is computed: all, but with an entropy only those with weight 0."""
    divisor: mx.array | None
    deferred: mx.array | None
    """0-d factor that is multiplied into float16 gradients later, so that they do not underflow."""

    def of_rows(self, upstream: mx.array | None) -> "DivergenceFacts":
        """Return the facts for the upstream gradient (...) of the rows' losses; None for 1."""
        if upstream is None:
            return self
        return replace(self, scale=self.scale * upstream.reshape(-1).astype(self.scale.dtype))

    def factor(self, upstream: mx.array | None) -> mx.array | None:
        """Return the remaining factor of a gradient, for the upstream gradient of a reduced loss. None means 1."""
        if upstream is None:
            return self.deferred
        factor = upstream.astype(self.scale.dtype)
        return factor if self.deferred is None else factor * self.deferred


def gather_facts(call: DivergenceCall, known: KnownClasses | None) -> DivergenceFacts:
    """Return the facts of all rows; there is at least one."""
    acc, count = accumulation_dtype(call.array.dtype), int(np.prod(call.rows))
    weight = mx.ones((count,), acc)
    if call.sample_weight is not None:
        weight = call.sample_weight.reshape(-1).astype(acc)
    dead, divisor = weight == 0, None
    idle = dead
    if call.reduction == "mean":
        given: Any = call.normalizer
        divisor = weight.sum() if given is None else mx.array(given).astype(acc)
        dead = dead | (divisor == 0)
    if not call.stats:
        idle = dead
    if known is not None:
        weight = mx.where(_impossible(call, known, dead), mx.nan, weight)
    scale, deferred = weight, None
    inverse = None if divisor is None else mx.where(divisor == 0, 0, 1 / divisor)
    narrow = isinstance(call.student, LinearLogits) and call.array.dtype == mx.float16
    if inverse is not None and narrow:
        # With 1/D, float16 gradients would underflow before the loss scale is multiplied in.
        deferred = inverse
    elif inverse is not None:
        scale = weight * inverse
    if narrow and call.reduction != "none":
        largest = mx.abs(mx.where(weight == weight, weight, 0)).max()
        size = mx.where(largest == 0, 1, largest)
        scale, deferred = scale / size, size if deferred is None else deferred * size
    return DivergenceFacts(weight, scale, dead, idle, divisor, deferred)


def known_classes(call: DivergenceCall) -> KnownClasses | None:
    """Return the classes of a top-k teacher; None for other teachers."""
    teacher = call.teacher
    if not isinstance(teacher, TopKTeacher):
        return None
    count, acc = int(np.prod(call.rows)), accumulation_dtype(call.array.dtype)
    given = teacher.ids.reshape(count, teacher.ids.shape[-1]).astype(mx.int64)
    log_q = teacher.log_probs.reshape(given.shape).astype(acc)
    # Padding entries get distinct negative numbers.
    none = -1 - mx.arange(given.shape[1], dtype=mx.int64)
    ids = mx.where(log_q == -mx.inf, none, mx.where((given < 0) | (given >= call.vocabulary), call.vocabulary, given))
    return KnownClasses(ids, log_q, teacher.tail, mass_tolerance(dtype_name(teacher.log_probs)))


def _impossible(call: DivergenceCall, known: KnownClasses, dead: mx.array) -> mx.array:
    """Return the rows (N,) with invalid teacher values, except dead ones; raise if XENT_CHECK_TARGETS is 1."""
    outside = (known.ids == call.vocabulary).any(-1)
    ordered = mx.sort(known.ids, axis=-1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    mass = mx.exp(known.log_q).sum(-1)
    heavy = ~(mass <= 1 + known.tolerance)
    empty = mass == 0 if known.tail == "renormalize" else mx.zeros_like(heavy)
    wrong = (outside | repeated | heavy | empty) & ~dead
    if os.environ.get("XENT_CHECK_TARGETS") == "1" and not is_traced(known.ids) and wrong.any().item():
        row = int(np.array(mx.argmax(wrong)))
        name = f"of row {[int(index) for index in np.unravel_index(row, call.rows)]}"
        if outside[row].item():
            raise IndexError(f"teacher.ids {name} holds a class outside of 0 to {call.vocabulary - 1}")
        if repeated[row].item():
            raise ValueError(f"teacher.ids {name} holds a class more than once")
        if empty[row].item():
            raise ValueError(f"teacher.log_probs {name} have no mass that could be renormalised")
        raise ValueError(
            f"teacher.log_probs {name} have a mass of {mass[row].item():.6g}, more than 1 by more than rounding"
        )
    return wrong
