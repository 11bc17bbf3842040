"""Prepare a call for the loop: classes last, one value per row, shifts and heads applied, values checked if asked for.

`aligned` is the part that autograd sees. `prepare` is the rest, on arrays that MLX does not differentiate. Values are
checked with XENT_CHECK_TARGETS=1; without it, rows with invalid values are NaN.
"""

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import numpy as np

from xent.backends.mlx.devices import accumulation_dtype
from xent.core.arrays import dtype_name
from xent.core.call import (
    Allowed,
    Call,
    Classes,
    Dense,
    Given,
    Probabilities,
    Source,
    TopK,
    array_of,
    vocabulary_of,
)
from xent.core.describe_divergence import check_values, gathered
from xent.core.spec import LARGEST
from xent.core.values import check_support, check_targets, check_temperature, check_top_k

__all__ = ["aligned", "prepare"]


def aligned(call: Call) -> Call:
    """Return the call with the classes of logits and probabilities on the last axis. Raise TypeError for mixed dtypes.

    MLX would promote arrays of several dtypes to a slower float32 product.
    """
    source, target = call.source, call.target
    if isinstance(target, Probabilities) and isinstance(source, Given):
        target = target._replace(values=mx.moveaxis(target.values, source.axis, -1))
    elif isinstance(target, Dense):
        target = _restricted(target._replace(source=_aligned(target.source, "teacher.")))
    return call._replace(source=_aligned(source, "linear_"), target=target)


def _restricted(target: Dense) -> Dense:
    """Return a teacher with the student's classes only; invalid classes make it NaN."""
    if target.ids is None:
        return target
    ids, source = target.ids.astype(mx.int64), target.source
    _check(check_values, (ids,), source)
    ordered, places = mx.sort(ids), mx.clip(ids, 0, max(vocabulary_of(source) - 1, 0))
    wrong = (ids != places).any() | (ordered[1:] == ordered[:-1]).any()
    source = gathered(source, places)
    values = source.logits if isinstance(source, Given) else source.input
    values = mx.where(wrong, mx.nan, values).astype(values.dtype)
    changed: Source = source._replace(logits=values) if isinstance(source, Given) else source._replace(input=values)
    return Dense(changed, target.activation)


def _aligned(source: Source, prefix: str) -> Source:
    if isinstance(source, Given):
        return source._replace(logits=mx.moveaxis(source.logits, source.axis, -1), axis=source.logits.ndim - 1)
    for name, array in (("weight", source.weight), ("bias", source.bias)):
        if isinstance(array, mx.array) and array.dtype != source.input.dtype:
            raise TypeError(
                f"{prefix}{name} must have the dtype of {prefix.removeprefix('linear_')}input, {source.input.dtype}; "
                f"got {array.dtype}: cast it with astype"
            )
    return source


def prepare(call: Call) -> Call:
    """Return an aligned call in the form of the loop; it has at least one row."""
    source, target, activation, options, _ = call
    rows, vocabulary = tuple(array_of(call).shape[:-1]), vocabulary_of(source)
    acc = accumulation_dtype(array_of(call).dtype)
    shifts = options.shift if isinstance(options.shift, tuple) else (options.shift,)
    shape = rows if options.heads is None else rows[1:]

    def each(values: mx.array, fill: Any) -> mx.array:
        """Return the values (N,) of the rows, from those of the targets (..., T)."""
        parts = [_shifted(values, shift, fill) for shift in shifts]
        return (parts[0] if options.heads is None else mx.stack(parts)).reshape(-1)

    if isinstance(target, (Classes, Allowed)):
        _check(check_targets, (target.ids,), vocabulary, options.ignore_index, min(shifts))
        ids = each(target.ids.astype(mx.int64), options.ignore_index)
        target = Classes(ids) if isinstance(target, Classes) else _support(target, ids, shape, vocabulary, each)
    elif isinstance(target, Probabilities):
        moved = any(shifts) or options.heads is not None
        order = each(mx.arange(math.prod(shape)).reshape(shape), -1) if moved else None
        target = Probabilities(target.values.reshape(-1, vocabulary), order)
    temperature, weight = activation.temperature, options.sample_weight
    if temperature is not None:
        _check(check_temperature, (temperature,), min(shifts))
        temperature = each(mx.broadcast_to(temperature.astype(acc), shape), 1)
        temperature = mx.where(temperature > 0, mx.minimum(temperature, LARGEST), mx.nan)
    if weight is None and any(shifts) and isinstance(target, (Dense, TopK)):
        weight = mx.ones(shape, acc)
    if weight is not None:
        weight = each(weight.astype(acc), 0)
    if isinstance(target, TopK):
        used = mx.ones(rows, mx.bool_) if weight is None else weight.reshape(rows) != 0
        _check(check_top_k, (*target[:2], used), target.tail, dtype_name(target.log_probs), vocabulary)
        ids, log_probs = (values.reshape(-1, values.shape[-1]) for values in target[:2])
        target = TopK(ids, log_probs, target.tail)
    options = options._replace(sample_weight=weight, shift=0)
    return Call(source, target, activation._replace(temperature=temperature), options)


def _check(check: Callable[..., None], arrays: Iterable[mx.array], *others: Any) -> None:
    """Call `check` with NumPy arrays and others, if checks are on. While mx.compile traces, there are no values."""
    if os.environ.get("XENT_CHECK_TARGETS") != "1":
        return
    values = []
    for array in arrays:
        try:
            mx.eval(array)
        except ValueError:
            return
        if mx.issubdtype(array.dtype, mx.floating):
            values.append(np.array(array if array.dtype == mx.float64 else array.astype(mx.float32), np.float64))
        else:
            values.append(np.array(array.astype(mx.int64)))
    check(*values, *others)


def _shifted(values: mx.array, shift: int, fill: Any) -> mx.array:
    """Return an array with values[..., t + shift] at t, and `fill` past the end."""
    if not shift:
        return values
    kept = values[..., min(shift, values.shape[-1]) :]
    missing = (*values.shape[:-1], values.shape[-1] - kept.shape[-1])
    return mx.concatenate([kept, mx.full(missing, fill, dtype=values.dtype)], axis=-1)


def _support(target: Allowed, ids: mx.array, shape: tuple[int, ...], vocabulary: int, each: Any) -> Allowed:
    """Return the support of each row; at least one entry, which belongs to no row if there is none."""
    _check(check_support, target[1:4], vocabulary)
    given = len(target.classes)
    classes = target.classes.astype(mx.int64) if given else mx.zeros((1,), mx.int64)
    begin, end = (part.astype(mx.int64) for part in (target.begin, target.end))
    sizes = end - begin
    broken = (begin[0] != 0) | (end[-1] != given) | ((sizes < 0) | (sizes > vocabulary)).any()
    begin, end = (each(mx.clip(part, 0, len(classes)).astype(mx.int32).reshape(shape), 0) for part in (begin, end))
    return Allowed(ids, classes, begin, end, broken)
