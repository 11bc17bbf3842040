"""Facts: the data of each row that does not depend on logits, such as target, row weight and gradient factor."""

from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx

from xent.backends.mlx.kernels import RowFacts
from xent.backends.mlx.options import numbers_of, softcap_of, terms_of
from xent.backends.mlx.prepare import accumulation_dtype, scalar
from xent.backends.mlx.support import Entries, gather_entries
from xent.backends.mlx.top_k import Known, impossible, known_classes
from xent.core.call import Allowed, Call, Classes, Probabilities, TopK, array_of, vocabulary_of

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
    support: Entries | None = None
    """The classes that a sampler allowed for each row; None for all classes."""
    known: Known | None = None
    """The classes that a top-k teacher knows."""

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
        rows = self.rows if whole else self.rows.part(part.start, part.stop)
        target = self.call.target
        if not isinstance(target, Probabilities):
            return rows
        if target.order is not None:
            given = target.values[mx.maximum(target.order[part], 0)]
        else:
            given = target.values if whole else target.values[part]
        return replace(rows, probabilities=given)

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


def gather_facts(call: Call, shape: tuple[int, ...]) -> Facts:
    """Return the facts of all rows of a prepared call; `shape` is that of a result per row."""
    target, activation, options, dtype = call.target, call.activation, call.options, array_of(call).dtype
    acc, vocabulary = accumulation_dtype(dtype), vocabulary_of(call.source)
    class_weight = None if options.weight is None else options.weight.astype(acc)
    classes = invalid = bend = row_weight = support = known = None
    weight = options.sample_weight
    if isinstance(target, (Classes, Allowed)):
        ignored = target.ids == mx.array(options.ignore_index, dtype=mx.int64)
        invalid = ((target.ids < 0) | (target.ids >= vocabulary)) & ~ignored
        classes = mx.where(ignored | invalid, 0, target.ids).astype(mx.int32)
        row_weight = None if class_weight is None else class_weight[classes]
    elif isinstance(target, Probabilities):
        ignored = mx.zeros((len(target.values),), mx.bool_) if target.order is None else target.order < 0
    else:
        ignored = (
            mx.zeros((array_of(call).size // array_of(call).shape[-1],), mx.bool_) if weight is None else weight == 0
        )
    if activation.temperature is not None:
        temperature = mx.where(ignored, 1, activation.temperature)
        numbers = (activation.logit_scale, softcap_of(activation))
        bend = mx.stack([scalar(number, acc) / temperature for number in numbers], axis=-1)
        invalid = None if invalid is None else invalid | mx.isnan(bend[:, 0])
    if isinstance(target, Allowed) and invalid is not None:
        support = gather_entries(target, vocabulary)
        invalid = invalid | (support.wrong & ~ignored)
    if isinstance(target, TopK):
        known = known_classes(target, vocabulary, acc)
        invalid = impossible(known, ignored, vocabulary, shape)
    weight = mx.where(ignored, 0, mx.ones(ignored.shape, acc) if weight is None else weight)
    whole = weight if row_weight is None else weight * row_weight
    divisor = None
    if options.reduction == "mean":
        parts = whole if invalid is None else mx.where(invalid, 0, whole)
        divisor = parts.sum() if options.normalizer is None else scalar(options.normalizer, acc)
    dead = weight == 0 if divisor is None else (weight == 0) | (divisor == 0)
    if invalid is not None:
        weight = mx.where(invalid, mx.nan, weight)
        dead = dead & ~invalid
    scale, deferred = weight, None
    if (
        dtype == mx.float16
        and options.reduction != "none"
        and (divisor is not None or options.sample_weight is not None)
    ):
        # With 1/D, float16 gradients would underflow before the loss scale is multiplied in, and with large row weights
        # they could overflow. So the stored gradients have row factors of at most 1.
        largest = mx.nan_to_num(mx.abs(whole)).max()
        size = mx.where(largest == 0, 1, largest)
        scale = weight / size
        deferred = size if divisor is None else mx.where(divisor == 0, 0, size / divisor)
    elif divisor is not None:
        scale = mx.where(divisor == 0, 0, weight / divisor)  # 1/D would be infinite if D is below the normal numbers
    rows = RowFacts(
        terms=terms_of(call),
        numbers=numbers_of(call, vocabulary, class_weight, acc),
        target=classes,
        probabilities=None,
        weight=weight,
        scale=scale,
        dead=dead,
        class_weight=class_weight,
        target_logits=None,
        finite=False,
        alone=False,
        bend=bend,
    )
    return Facts(call, rows, ignored, invalid, deferred, divisor, support, known)
