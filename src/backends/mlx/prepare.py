"""Prepare a call for the loop: classes last, one value per row, shifts and heads applied, values checked if asked for.

`aligned` is the part that autograd sees. `prepare` is the rest, on arrays that MLX does not differentiate.
"""

import math
from typing import Any

import mlx.core as mx

from xent.backends.mlx.checks import check_subset, check_support, check_targets, check_temperature
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
from xent.core.describe_divergence import gathered
from xent.core.spec import LARGEST

__all__ = ["accumulation_dtype", "aligned", "prepare", "rows_of", "scalar"]


def accumulation_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """Return the dtype of sums, of per-row results and of the loss."""
    return mx.float64 if dtype == mx.float64 else mx.float32


def scalar(value: Any, dtype: mx.Dtype) -> mx.array:
    """Return a number or a 0-d array as a 0-d array of `dtype`."""
    return value.astype(dtype) if isinstance(value, mx.array) else mx.array(float(value), dtype=dtype)


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
    check_subset(ids, source)
    ordered, places = mx.sort(ids), mx.clip(ids, 0, max(vocabulary_of(source) - 1, 0))
    wrong = (ids != places).any() | (ordered[1:] == ordered[:-1]).any()
    source = gathered(source, places)
    values = source.logits if isinstance(source, Given) else source.input
    values = mx.where(wrong, mx.nan, values).astype(values.dtype)
    if isinstance(source, Given):
        return Dense(source._replace(logits=values), target.activation)
    return Dense(source._replace(input=values), target.activation)


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


def rows_of(call: Call) -> tuple[int, ...]:
    """Return the shape of a result per row, for an aligned call."""
    return tuple(array_of(call).shape[:-1])


def prepare(call: Call) -> Call:
    """Return an aligned call in the form of the loop; it has at least one row."""
    source, target, activation, options, _ = call
    rows, vocabulary = rows_of(call), vocabulary_of(source)
    acc = accumulation_dtype(array_of(call).dtype)
    shifts = options.shift if isinstance(options.shift, tuple) else (options.shift,)
    shape = rows if options.heads is None else rows[1:]

    def each(values: mx.array, fill: Any) -> mx.array:
        """Return the values (N,) of the rows, from those of the targets (..., T)."""
        parts = [_shifted(values, shift, fill) for shift in shifts]
        return (parts[0] if options.heads is None else mx.stack(parts)).reshape(-1)

    if isinstance(target, (Classes, Allowed)):
        check_targets(target.ids, vocabulary, options.ignore_index, min(shifts))
        ids = each(target.ids.astype(mx.int64), options.ignore_index)
        target = Classes(ids) if isinstance(target, Classes) else _support(target, ids, shape, vocabulary, each)
    elif isinstance(target, Probabilities):
        places = mx.arange(math.prod(shape)).reshape(shape)
        target = Probabilities(target.values.reshape(-1, vocabulary), each(places, -1) if any(shifts) else None)
        if options.heads is not None and target.order is None:
            target = target._replace(order=each(places, -1))
    elif isinstance(target, TopK):
        ids, log_probs = (values.reshape(-1, values.shape[-1]) for values in target[:2])
        target = TopK(ids, log_probs, target.tail)
    temperature, weight = activation.temperature, options.sample_weight
    if temperature is not None:
        check_temperature(temperature, min(shifts))
        temperature = each(mx.broadcast_to(temperature.astype(acc), shape), 1)
        temperature = mx.where(temperature > 0, mx.minimum(temperature, LARGEST), mx.nan)
    if weight is None and any(shifts) and isinstance(target, (Dense, TopK)):
        weight = mx.ones(shape, acc)
    if weight is not None:
        weight = each(weight.astype(acc), 0)
    options = options._replace(sample_weight=weight, shift=0)
    call = Call(source, target, activation._replace(temperature=temperature), options)
    return call if options.heads is None else _with_heads(call, acc)


def _shifted(values: mx.array, shift: int, fill: Any) -> mx.array:
    """Return an array with values[..., t + shift] at t, and `fill` past the end."""
    if not shift:
        return values
    kept = values[..., min(shift, values.shape[-1]) :]
    missing = (*values.shape[:-1], values.shape[-1] - kept.shape[-1])
    return mx.concatenate([kept, mx.full(missing, fill, dtype=values.dtype)], axis=-1)


def _support(target: Allowed, ids: mx.array, shape: tuple[int, ...], vocabulary: int, each: Any) -> Allowed:
    """Return the support of each row; at least one entry, which belongs to no row if there is none."""
    check_support(target, vocabulary)
    given = len(target.classes)
    classes = target.classes.astype(mx.int64) if given else mx.zeros((1,), mx.int64)
    begin, end = (part.astype(mx.int64) for part in (target.begin, target.end))
    sizes = end - begin
    broken = (begin[0] != 0) | (end[-1] != given) | ((sizes < 0) | (sizes > vocabulary)).any()
    begin, end = (each(mx.clip(part, 0, len(classes)).astype(mx.int32).reshape(shape), 0) for part in (begin, end))
    return Allowed(ids, classes, begin, end, broken)


def _with_heads(call: Call, acc: mx.Dtype) -> Call:
    """Make the sum of the heads' losses one sum over all rows: a row has the weight of its head over its divisor."""
    options, target = call.options, call.target
    assert isinstance(target, (Classes, Probabilities))
    assert options.heads is not None
    if isinstance(target, Classes):
        known = (target.ids >= 0) & (target.ids < vocabulary_of(call.source))
        counted = target.ids != mx.array(options.ignore_index, dtype=mx.int64)
        known = known & counted
    else:
        known = counted = target.order >= 0
    weight = counted.astype(acc)
    if options.sample_weight is not None:
        weight = mx.where(counted, options.sample_weight, 0)
    weight = weight.reshape(options.heads, -1)
    if options.reduction == "mean":
        parts = mx.where(known.reshape(weight.shape), weight, 0)
        if options.weight is not None and isinstance(target, Classes):
            parts = parts * options.weight.astype(acc)[mx.where(known, target.ids, 0)].reshape(weight.shape)
        given = options.normalizer
        divisor = parts.sum(1, keepdims=True) if given is None else scalar(given, acc)
        weight = mx.where(divisor == 0, 0, weight / divisor)
    if options.head_weight is not None:
        weight = mx.stack([row * factor for row, factor in zip(weight, options.head_weight, strict=True)])
    options = options._replace(
        reduction="none" if options.reduction == "none" else "sum",
        sample_weight=weight.reshape(-1),
        normalizer=None,
        heads=None,
        head_weight=None,
    )
    return call._replace(options=options)
