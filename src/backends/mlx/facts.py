"""Facts: the data of each row that does not depend on logits, such as target, row weight and gradient factor.

An option may be a 0-d array instead of a Python number. A compiled function then uses the value at each call, while a
new Python number would cause it to be traced again.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from xent.backends.mlx.devices import accumulation_dtype, scalar
from xent.backends.mlx.kernels import RowFacts, Terms
from xent.core.call import Activation, Allowed, Call, Classes, Probabilities, array_of, vocabulary_of
from xent.core.spec import LARGEST

__all__ = ["Facts", "gather_facts"]


@dataclass(frozen=True, eq=False)
class Facts:
    """The facts of the N rows of a prepared call: those for a row kernel, and those that only the driver needs."""

    call: Call
    rows: RowFacts
    ignored: mx.array
    """(N,) bool: rows without a target; of a divergence, rows with weight 0."""
    invalid: mx.array | None
    """(N,) bool: rows with a target outside [0, V), a temperature that is not > 0, an invalid support or invalid values
    of a teacher. Their loss and gradient are NaN. None for class probabilities."""
    deferred: mx.array | None
    """0-d factor that the driver multiplies into float16 gradients later, so that they do not underflow."""
    divisor: mx.array | None
    """0-d, the divisor of "mean"; None for the other reductions."""

    @property
    def count(self) -> int:
        """N."""
        return int(self.ignored.size)

    @property
    def vocabulary(self) -> int:
        """V."""
        return vocabulary_of(self.call.source)

    @property
    def idle(self) -> mx.array:
        """(N,) bool: rows of which nothing is computed. Every row with a target has statistics, even with weight 0."""
        return self.ignored if self.call.options.stats else self.rows.dead

    @cached_property
    def counted(self) -> mx.array:
        """0-d, the number of rows with a target. Cached, because mx.compile fails if a result is computed twice."""
        return (~self.ignored).sum()

    def block(self, part: slice) -> RowFacts:
        """Return the facts of some rows for a row kernel."""
        whole = part.stop - part.start == self.count
        rows, target = self.rows if whole else self.rows.part(part), self.call.target
        if not isinstance(target, Probabilities):
            return rows
        place = part if target.order is None else mx.maximum(target.order[part], 0)
        return replace(rows, probabilities=target.values if whole and place is part else target.values[place])

    def factor(self, upstream: mx.array | None) -> mx.array | None:
        """Return the remaining 0-d factor of a gradient, for an upstream gradient. None means 1."""
        if upstream is None:
            return self.deferred
        factor = upstream.astype(self.rows.weight.dtype)
        return factor if self.deferred is None else factor * self.deferred

    def with_upstream(self, upstream: dict[str, mx.array | None], entropy: mx.array | None) -> "Facts":
        """Return the facts for the gradient of rows, from the upstream gradients of their losses and statistics.

        `entropy` (N,) is the statistic itself, if it has an upstream gradient.
        """
        acc, rows = self.rows.scale.dtype, self.rows
        flat = {name: one.reshape(-1).astype(acc) for name, one in upstream.items() if one is not None}
        scale = rows.scale * flat.pop("loss") if "loss" in flat else rows.scale
        if not flat:
            return replace(self, rows=replace(rows, scale=scale))
        if entropy is not None:
            flat["H"] = entropy
        scale = mx.where(rows.dead, 0, scale)  # rows with weight 0 have statistics too
        return replace(self, rows=replace(rows, scale=scale, dead=self.ignored, upstream=flat))


def gather_facts(call: Call, wrong: mx.array | None = None) -> Facts:
    """Return the facts of all rows of a prepared call. `wrong` rows (N,) have an invalid support or teacher."""
    target, activation, options, dtype = call.target, call.activation, call.options, array_of(call).dtype
    acc, vocabulary, count = accumulation_dtype(dtype), vocabulary_of(call.source), array_of(call).size
    class_weight = None if options.weight is None else options.weight.astype(acc)
    classes = invalid = bend = divisor = deferred = None
    weight = options.sample_weight
    if isinstance(target, (Classes, Allowed)):
        ignored = target.ids == mx.array(options.ignore_index, dtype=mx.int64)
        invalid = ((target.ids < 0) | (target.ids >= vocabulary)) & ~ignored
        classes = mx.where(ignored | invalid, 0, target.ids).astype(mx.int32)
    elif isinstance(target, Probabilities) and target.order is not None:
        ignored = target.order < 0
    elif isinstance(target, Probabilities) or weight is None:
        ignored = mx.zeros((count // array_of(call).shape[-1],), mx.bool_)
    else:
        ignored = weight == 0
    if activation.temperature is not None:
        temperature = mx.where(ignored, 1, activation.temperature)
        numbers = (activation.logit_scale, _softcap(activation))
        bend = mx.stack([scalar(number, acc) / temperature for number in numbers], axis=-1)
        invalid = None if invalid is None else invalid | mx.isnan(bend[:, 0])
    if wrong is not None:
        wrong = wrong & ~ignored
        invalid = wrong if invalid is None else invalid | wrong
    weight = mx.where(ignored, 0, mx.ones(ignored.shape, acc) if weight is None else weight)
    by_class = 1 if class_weight is None or classes is None else class_weight[classes]
    if options.reduction == "mean":
        parts = weight * by_class if invalid is None else mx.where(invalid, 0, weight * by_class)
        given = options.normalizer
        divisor = parts.reshape(options.heads or 1, -1).sum(1, keepdims=True) if given is None else scalar(given, acc)
    if options.heads is not None:
        # The sum of the heads' losses is one sum over all rows: a row has the weight of its head over its divisor.
        of_heads = weight.reshape(options.heads, -1)
        if divisor is not None:
            of_heads, divisor = mx.where(divisor == 0, 0, of_heads / divisor), None
        if options.head_weight is not None:
            of_heads = mx.stack([row * factor for row, factor in zip(of_heads, options.head_weight, strict=True)])
        weight = of_heads.reshape(-1)
    elif divisor is not None:
        divisor = divisor.reshape(())
    whole = weight * by_class
    dead = weight == 0 if divisor is None else (weight == 0) | (divisor == 0)
    if invalid is not None:
        weight = mx.where(invalid, mx.nan, weight)
        dead = dead & ~invalid
    scale = weight
    varies = options.reduction == "mean" or options.heads is not None or options.sample_weight is not None
    if dtype == mx.float16 and options.reduction != "none" and varies:
        # With 1/D, float16 gradients would underflow before the loss scale is multiplied in, and with large row weights
        # they could overflow. So the stored gradients have row factors of at most 1.
        largest = mx.nan_to_num(mx.abs(whole)).max()
        size = mx.where(largest == 0, 1, largest)
        scale = weight / size
        deferred = size if divisor is None else mx.where(divisor == 0, 0, size / divisor)
    elif divisor is not None:
        scale = mx.where(divisor == 0, 0, weight / divisor)  # 1/D would be infinite if D is below the normal numbers
    rows = RowFacts(
        terms=Terms(
            smoothing=_differs(options.label_smoothing, 0),
            z_loss=_differs(options.z_loss, 0),
            softcap=activation.softcap is not None,
            scale=activation.temperature is not None or _differs(activation.logit_scale, 1),
        ),
        numbers=_numbers(call, class_weight, acc),
        target=classes,
        probabilities=None,
        weight=weight,
        scale=scale,
        dead=dead,
        class_weight=class_weight,
        bend=bend,
    )
    return Facts(call, rows, ignored, invalid, deferred, divisor)


def _numbers(call: Call, class_weight: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """Return `xent.backends.mlx.kernels.RowFacts.numbers`, (8,)."""
    vocabulary, activation, options = vocabulary_of(call.source), call.activation, call.options
    total: Any = vocabulary if class_weight is None else class_weight.sum()
    smoothing = options.label_smoothing
    given = [smoothing, options.z_loss, _softcap(activation), activation.logit_scale, smoothing / vocabulary, total]
    if any(isinstance(value, mx.array) for value in given):
        return mx.stack([scalar(value, dtype) for value in (*given, 0, 0)])
    return mx.array([*given, 0.0, 0.0], dtype=dtype)


def _softcap(activation: Activation) -> Any:
    """Return the softcap as a number or array, bounded by `LARGEST`; 0 for none."""
    cap: Any = 0.0 if activation.softcap is None else activation.softcap
    return mx.minimum(cap, LARGEST) if isinstance(cap, mx.array) else cap


def _differs(value: Any, neutral: float) -> bool:
    """Whether an option has an effect. One that is in an array is included for every value."""
    return isinstance(value, mx.array) or value != neutral
