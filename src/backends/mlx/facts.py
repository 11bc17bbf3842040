"""Facts: the data of each row that does not depend on logits, such as target, row weight and gradient factor."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from xent.backends.mlx.checks import check_targets, check_temperature
from xent.backends.mlx.kernels import RowFacts
from xent.backends.mlx.options import numbers_of, scalar, softcap_of, terms_of
from xent.backends.mlx.shifts import shifted
from xent.backends.mlx.support import Entries, gather_entries
from xent.core.spec import LARGEST, LinearCall, LogitsCall, LossSpec

__all__ = ["Facts", "accumulation_dtype", "gather_facts", "is_float"]


@dataclass(frozen=True, eq=False)
class Facts:
    """The facts of N rows of V classes: those for a row kernel, and those that only the driver needs."""

    spec: LossSpec
    vocabulary: int
    rows: RowFacts
    probabilities: mx.array | None
    """(N, V) in the caller's dtype."""
    probability_rows: mx.array | None
    """(N,) the index of each row in `probabilities`; None if it is the row's own index."""
    ignored: mx.array
    """(N,) bool: rows without a target."""
    invalid: mx.array | None
    """(N,) bool: rows with a target outside [0, V), a temperature that is not > 0, or an invalid support. Their loss
    and gradient are NaN. None for class probabilities."""
    deferred: mx.array | None
    """0-d factor that the driver multiplies into float16 gradients later, so that they do not underflow."""
    divisor: mx.array | None
    """0-d, the divisor of "mean"; None for the other reductions."""
    support: Entries | None
    """The classes that a sampler allowed for each row; None for all classes."""

    @property
    def count(self) -> int:
        """N."""
        return int(self.ignored.size)

    @cached_property
    def counted(self) -> mx.array:
        """0-d, the number of rows with a target. Cached, because mx.compile fails if a result is computed twice."""
        return (~self.ignored).sum()

    def all_rows(self) -> RowFacts:
        """Return the facts of all rows for a row kernel, as one block."""
        return replace(self.rows, probabilities=self.probability_block(0, self.count), alone=True)

    def block(self, start: int, stop: int, target_logits: mx.array | None = None) -> RowFacts:
        """Return the facts of rows [start, stop) for a row kernel."""
        rows, given = self.rows.part(start, stop), self.probability_block(start, stop)
        return replace(rows, probabilities=given, target_logits=target_logits)

    def probability_block(self, start: int, stop: int) -> mx.array | None:
        """Return the target probabilities of rows [start, stop), (R, V), in the caller's dtype."""
        if self.probabilities is None or self.probability_rows is None:
            return None if self.probabilities is None else self.probabilities[start:stop]
        return self.probabilities[self.probability_rows[start:stop]]

    def scattered(self, values: mx.array, start: int, stop: int) -> mx.array:
        """Return rows [start, stop) of a gradient (R, V): `values` (M,) at the entries, else 0; NaN in invalid rows."""
        assert self.support is not None
        assert self.invalid is not None
        inside, row = self.support.within(start, stop)
        nothing = mx.where(self.invalid[start:stop, None], mx.nan, 0).astype(values.dtype)
        grad = mx.broadcast_to(nothing, (stop - start, self.vocabulary))
        return grad.at[row, self.support.ids].add(mx.where(inside, values, 0))

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


def accumulation_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """Return the dtype of sums, of per-row results and of the loss."""
    return mx.float64 if dtype == mx.float64 else mx.float32


def is_float(array: mx.array) -> bool:
    """Whether an array holds floating-point numbers."""
    return bool(mx.issubdtype(array.dtype, mx.floating))


def gather_facts(call: LogitsCall | LinearCall, target: mx.array, vocabulary: int, dtype: mx.Dtype) -> Facts:
    """Return the facts of all rows of a call whose logits have `dtype`; the classes of `target` are on its last axis.

    Row t has the target and sample weight t + shift along the last axis of the rows.
    """
    spec, acc = call.loss, accumulation_dtype(dtype)
    shift = call.shift if isinstance(call, LinearCall) else 0
    given = is_float(target)
    shape = target.shape[:-1] if given else target.shape
    count = int(np.prod(shape))
    class_weight = None if call.weight is None else call.weight.astype(acc)
    bend = support = None
    probabilities = rows_of = classes = invalid = row_weight = None
    ignored = ~shifted(mx.ones(shape, mx.bool_), shift, False).reshape(-1)
    if given:
        probabilities = target.reshape(count, vocabulary)
        rows_of = shifted(mx.arange(count).reshape(shape), shift, 0).reshape(-1) if shift else None
    else:
        check_targets(target, vocabulary, spec.ignore_index, shift)
        ignore = mx.array(spec.ignore_index, dtype=mx.int64)
        wide = shifted(target.astype(mx.int64), shift, spec.ignore_index).reshape(-1)
        ignored = (wide == ignore) | ignored
        invalid = ((wide < 0) | (wide >= vocabulary)) & ~ignored
        classes = mx.where(ignored | invalid, 0, wide).astype(mx.int32)
        row_weight = None if class_weight is None else class_weight[classes]

    if call.temperature is not None:
        bend = _bend(call, shape, shift, ignored, acc)
        invalid = None if invalid is None else invalid | mx.isnan(bend[:, 0])
    if call.support is not None and invalid is not None:
        support = gather_entries(call.support, shape, vocabulary, shift)
        invalid = invalid | (support.wrong & ~ignored)
    sample = call.sample_weight
    weight = mx.ones(shape, acc) if sample is None else sample.astype(acc)
    weight = mx.where(ignored, 0, shifted(weight, shift, 0).reshape(-1))
    divisor = _divisor(call.normalizer, weight, row_weight, invalid) if spec.reduction == "mean" else None
    dead = weight == 0
    if divisor is not None:
        dead = dead | (divisor == 0)
    if invalid is not None:
        weight = mx.where(invalid, mx.nan, weight)
        dead = dead & ~invalid
    scale, deferred = _scale(weight, row_weight, divisor, dtype)
    rows = RowFacts(
        terms=terms_of(spec, bent=bend is not None),
        numbers=numbers_of(spec, vocabulary, class_weight, acc),
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
    return Facts(spec, vocabulary, rows, probabilities, rows_of, ignored, invalid, deferred, divisor, support)


def _scale(
    weight: mx.array, row_weight: mx.array | None, divisor: mx.array | None, dtype: mx.Dtype
) -> tuple[mx.array, mx.array | None]:
    """Return the gradient factors of the rows, and the deferred factor."""
    if divisor is None:
        return weight, None
    # 1/D would be infinite if D is below the normal numbers.
    if dtype != mx.float16:
        return mx.where(divisor == 0, 0, weight / divisor), None
    # With 1/D, float16 gradients would underflow before the loss scale is multiplied in, and with large row weights
    # they could overflow. So the stored gradients have row factors of at most 1.
    largest = mx.nan_to_num(mx.abs(weight if row_weight is None else weight * row_weight)).max()
    size = mx.where(largest == 0, 1, largest)
    return weight / size, mx.where(divisor == 0, 0, size / divisor)


def _bend(
    call: LogitsCall | LinearCall, shape: tuple[int, ...], shift: int, ignored: mx.array, acc: mx.Dtype
) -> mx.array:
    """Return `xent.backends.mlx.kernels.RowFacts.bend`: scale and softcap, divided by the row's temperature."""
    check_temperature(call.temperature, shift)
    given = mx.broadcast_to(call.temperature.astype(acc), shape)
    temperature = shifted(given, shift, 1).reshape(-1)
    temperature = mx.where(temperature > 0, mx.minimum(temperature, LARGEST), mx.nan)
    temperature = mx.where(ignored, 1, temperature)
    numbers = (call.loss.logit_scale, softcap_of(call.loss, acc))
    return mx.stack([scalar(number, acc) / temperature for number in numbers], axis=-1)


def _divisor(normalizer: Any, weight: mx.array, row_weight: mx.array | None, invalid: mx.array | None) -> mx.array:
    if normalizer is not None:
        return scalar(normalizer, weight.dtype)
    parts = weight if row_weight is None else weight * row_weight
    return (parts if invalid is None else mx.where(invalid, 0, parts)).sum()
