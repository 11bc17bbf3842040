"""The rows of a call: classes last, one value per row, shifts and heads applied, values checked if asked for.

`aligned` is the part that autograd sees. `gather_facts` is the rest, on arrays that MLX does not differentiate. Values
are checked with XENT_CHECK_TARGETS=1; without it, rows with invalid values are NaN.

An option may be a 0-d array instead of a Python number. A compiled function then uses the value at each call, while a
new Python number would cause it to be traced again.
"""

import math
import os
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from xent.backends.mlx.devices import accumulation_dtype, class_sum, scalar
from xent.backends.mlx.kernels import Facts
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
    gathered,
    vocabulary_of,
)
from xent.core.spec import LARGEST, Scalar
from xent.core.validate import (
    check_subset,
    check_support,
    check_targets,
    check_temperature,
    check_top_k,
    invalid_top_k,
    outside,
    repeats,
)

__all__ = ["aligned", "gather_facts"]

_LEAST_SCALE = 2.0**-60  # of logits: with a smaller one, float16 logits and their gradient are 0
_Each = Callable[[mx.array, float], mx.array]


def aligned(call: Call) -> Call:
    """Return the call with the classes of logits and probabilities on the last axis. Raise TypeError for mixed dtypes.

    MLX would promote arrays of several dtypes to a slower float32 product.
    """
    source, target = call.source, call.target
    if isinstance(target, Probabilities) and isinstance(source, Given):
        target = target._replace(probs=mx.moveaxis(target.probs, source.axis, -1))
    elif isinstance(target, Dense):
        target = _restricted(target._replace(source=_aligned(target.source, "teacher.")))
    return call._replace(source=_aligned(source, "linear_"), target=target)


def _restricted(target: Dense) -> Dense:
    """Return a teacher with the student's classes only; invalid classes make it NaN."""
    if target.ids is None:
        return target
    ids = target.ids.astype(mx.int64)
    _check(check_subset, [ids], target.source)
    ordered, places = mx.sort(ids), mx.clip(ids, 0, max(vocabulary_of(target.source) - 1, 0))
    wrong = (ids != places).any() | repeats(ordered)
    source: Any = gathered(target.source, places)
    name = "logits" if isinstance(source, Given) else "input"
    array = getattr(source, name)
    return Dense(source._replace(**{name: mx.where(wrong, mx.nan, array).astype(array.dtype)}), target.activation)


def _aligned(source: Source, prefix: str) -> Source:
    if isinstance(source, Given):
        return source._replace(logits=mx.moveaxis(source.logits, source.axis, -1), axis=source.logits.ndim - 1)
    for name, array in (("weight", source.weight), ("bias", source.bias)):
        if isinstance(array, mx.array) and array.dtype != source.input.dtype:
            raise TypeError(
                f"{prefix}{name} must have the dtype of {prefix.removeprefix('linear_')}input, {source.input.dtype}; "
                f"got {array.dtype}: cast it with astype"
            )
    if not source.input.shape[-1]:
        # MLX cannot reshape arrays without elements. A column of zeros adds nothing to the logits.
        shapes = (*source.input.shape[:-1], 1), (vocabulary_of(source), 1)
        hidden, weight = (mx.zeros(shape, source.input.dtype) for shape in shapes)
        return source._replace(input=hidden, weight=weight)
    return source


def gather_facts(call: Call) -> Facts:
    """Return the facts of all rows of an aligned call; it has at least one row.

    The call of the facts has (N, V) class probabilities, and supports in the form of `_support`.
    """
    source, target, activation, options, _ = call
    rows, vocabulary, dtype = tuple(array_of(call).shape[:-1]), vocabulary_of(source), array_of(call).dtype
    acc, shape = accumulation_dtype(dtype), rows if options.heads is None else rows[1:]
    shifts = options.shift if isinstance(options.shift, tuple) else (options.shift,)

    def each(per_target: mx.array, fill: float) -> mx.array:
        """Return the values (N,) of the rows, from those of the targets (..., T)."""
        parts = [_shifted(per_target, shift, fill) for shift in shifts]
        return (parts[0] if options.heads is None else mx.stack(parts)).reshape(-1)

    weight, fields, invalid = options.sample_weight, dict[str, Any](), None
    if weight is None and any(shifts) and isinstance(target, (Dense, TopK)):
        weight = mx.ones(shape, acc)
    weight = None if weight is None else each(weight.astype(acc), 0)
    ignored = mx.zeros((math.prod(rows),), mx.bool_)
    if isinstance(target, (Classes, Allowed)):
        _check(check_targets, [target.ids], vocabulary, options.ignore_index, min(shifts))
        ids = each(target.ids.astype(mx.int64), options.ignore_index)
        ignored = ids == mx.array(options.ignore_index, dtype=mx.int64)
        invalid = outside(ids, vocabulary) & ~ignored
        fields["target"] = mx.where(ignored | invalid, 0, ids).astype(mx.int32)
        if isinstance(target, Allowed):
            target, broken = _support(target, shape, vocabulary, each)
            invalid = invalid | (broken & ~ignored)
            fields["sets"] = mx.stack([target.begin, target.end], axis=-1)
    elif isinstance(target, Probabilities):
        target = Probabilities(target.probs.reshape(-1, vocabulary))
        fields["probabilities"] = target.probs
        if any(shifts) or options.heads is not None:
            fields["order"] = order = each(mx.arange(math.prod(shape)).reshape(shape), -1)
            ignored = order < 0
    elif weight is not None:
        ignored = weight == 0
    if isinstance(target, TopK):
        used = mx.ones(rows, mx.bool_) if weight is None else weight.reshape(rows) != 0
        _check(check_top_k, [*target[:2], used], target, vocabulary)
        fields |= _known(target, vocabulary, acc)
        invalid = fields.pop("wrong") & ~ignored
    if activation.temperature is not None:
        assert isinstance(call.target, (Classes, Allowed))
        _check(check_temperature, [activation.temperature, call.target.ids], options.ignore_index, min(shifts))
        heat = each(mx.broadcast_to(activation.temperature.astype(acc), shape), 1)
        heat = mx.where(ignored, 1, mx.where(heat > 0, mx.minimum(heat, LARGEST), mx.nan))
        numbers = (activation.logit_scale, _softcap(call))
        fields["row_activation"] = mx.stack([scalar(number, acc) / heat for number in numbers], axis=-1)
        invalid = None if invalid is None else invalid | mx.isnan(heat)
    if "sets" in fields and invalid is not None:
        fields["sets"] = mx.where(invalid[:, None], -1, fields["sets"])
    class_weight = None if options.weight is None else options.weight.astype(acc)
    by_class = class_weight[fields["target"]] if class_weight is not None and "target" in fields else 1
    return Facts(
        call=call._replace(target=target),
        numbers=_numbers(call, class_weight, acc),
        ignored=ignored,
        invalid=invalid,
        class_weight=class_weight,
        **_weights(call, weight, ignored, invalid, by_class),
        **fields,
    )


def _weights(
    call: Call, weight: mx.array | None, ignored: mx.array, invalid: mx.array | None, by_class: mx.array | int
) -> dict[str, Any]:
    """Return weight, scale, excluded, deferred and divisor; `by_class` are the class weights of the targets."""
    options, dtype = call.options, array_of(call).dtype
    acc, divisor, deferred = accumulation_dtype(dtype), None, None
    weight = mx.where(ignored, 0, mx.ones(ignored.shape, acc) if weight is None else weight)
    if options.reduction == "mean":
        parts = weight * by_class if invalid is None else mx.where(invalid, 0, weight * by_class)
        if options.normalizer is None:
            divisor = parts.reshape(options.heads or 1, -1).sum(1, keepdims=True)
        else:
            divisor = scalar(options.normalizer, acc)
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
    excluded = weight == 0 if divisor is None else (weight == 0) | (divisor == 0)
    if invalid is not None:
        weight = mx.where(invalid, mx.nan, weight)
        excluded = excluded & ~invalid
    scale = weight
    if dtype == mx.float16 and options.reduction != "none":
        # With 1/D, float16 gradients would underflow before the loss scale is multiplied in, and with large weights or
        # scales they could overflow. So they are stored without 1/D, divided by a bound of their row factors.
        others = 4 * scalar(options.z_loss, acc)  # 2 zeta lse is at most 4 zeta 2^15, the half of float16's range
        if options.weight is not None:
            smoothing = 1 if isinstance(call.target, Probabilities) else options.label_smoothing
            others = others + scalar(smoothing, acc) * mx.abs(options.weight.astype(acc)).max()
        slope = mx.maximum(mx.abs(scalar(call.activation.logit_scale, acc)), _LEAST_SCALE)
        largest = mx.nan_to_num(mx.abs(whole) + others * mx.abs(weight)).max() * slope
        size = mx.where(largest == 0, 1, largest)
        if isinstance(call.source, Given) and not isinstance(call.target, (Dense, TopK)):
            size = mx.where(size > 2.0**-64, size / _headroom(call, slope), size)  # a normal number
        scale = weight / size
        deferred = size if divisor is None else mx.where(divisor == 0, 0, size / divisor)
    elif divisor is not None:  # 1/D would be infinite if D is below the normal numbers
        scale = mx.where(excluded, 0, weight / mx.where(divisor == 0, 1, divisor))
    return {"weight": weight, "scale": scale, "excluded": excluded, "deferred": deferred, "divisor": divisor}


def _headroom(call: Call, slope: mx.array) -> mx.array:
    """Return by how much the stored gradient of float16 logits may exceed 1, so that fewer elements underflow.

    No sum over rows can overflow, because the logits are given. Divided by the bound of row factors, an element is at
    most the sum of its row's class probabilities, and with a z-loss at most lse / 2 times that.
    """
    z_loss, softcap, target = call.options.z_loss, call.activation.softcap, call.target
    largest_x = 2.0**16 * slope if softcap is None else scalar(softcap, slope.dtype)
    lse = largest_x + math.log(max(vocabulary_of(call.source), 1))
    headroom = mx.where(scalar(z_loss, slope.dtype) == 0, 2.0**14, mx.maximum(2.0**15 / mx.maximum(lse, 2), 1))
    if isinstance(target, Probabilities):
        mass = class_sum(target.probs.astype(slope.dtype))
        headroom = headroom / mx.maximum(mx.where(mx.isfinite(mass), mass, 0).max(), 1)
    return headroom


def _support(target: Allowed, shape: tuple[int, ...], vocabulary: int, each: _Each) -> tuple[Allowed, mx.array]:
    """Return the target for rows, and whether their sets are invalid, (N,). The classes are int32, at least one."""
    offsets = target.offsets
    _check(check_support, [target.classes, offsets[:-1], offsets[1:]], vocabulary)
    entry_count = len(target.classes)
    classes = target.classes.astype(mx.int64) if entry_count else mx.zeros((1,), mx.int64)
    before = mx.pad(mx.cumsum(outside(classes, vocabulary)).astype(mx.int32), (1, 0))
    begin, end = offsets[:-1].astype(mx.int64), offsets[1:].astype(mx.int64)
    sizes = end - begin
    broken = (begin[0] != 0) | (end[-1] != entry_count) | ((sizes < 0) | (sizes > vocabulary)).any()
    begin, end = (each(mx.clip(part, 0, entry_count).astype(mx.int32).reshape(shape), 0) for part in (begin, end))
    return Allowed(target.ids, classes.astype(mx.int32), offsets, begin, end), broken | (before[begin] < before[end])


def _known(teacher: TopK, vocabulary: int, acc: mx.Dtype) -> dict[str, mx.array]:
    """Return the classes of a top-k teacher, and the "wrong" rows (N,) with invalid values."""
    ids, log_q = (array.reshape(-1, array.shape[-1]) for array in teacher[:2])
    ids, log_q = ids.astype(mx.int64), log_q.astype(acc)
    none = -1 - mx.arange(ids.shape[1], dtype=mx.int64)
    ids = mx.where(log_q == -mx.inf, none, mx.where(outside(ids, vocabulary), vocabulary, ids))
    wrong = invalid_top_k(mx.sort(ids, axis=-1), mx.exp(log_q).sum(-1), teacher, vocabulary)
    return {"ids": ids, "log_q": log_q, "wrong": wrong}


def _check(check: Callable[..., None], arrays: list[mx.array], *others: Any) -> None:
    """Call `check` with NumPy arrays and others, if checks are on. While mx.compile traces, there are no values."""
    if os.environ.get("XENT_CHECK_TARGETS") != "1":
        return
    converted = []
    for array in arrays:
        try:
            mx.eval(array)
        except ValueError:
            return
        if mx.issubdtype(array.dtype, mx.floating):
            converted.append(np.array(array if array.dtype == mx.float64 else array.astype(mx.float32), np.float64))
        else:
            converted.append(np.array(array.astype(mx.int64)))
    check(*converted, *others)


def _shifted(per_target: mx.array, shift: int, fill: float) -> mx.array:
    """Return an array with values[..., t + shift] at t, and `fill` past the end."""
    if not shift:
        return per_target
    rest = per_target[..., min(shift, per_target.shape[-1]) :]
    missing = (*per_target.shape[:-1], per_target.shape[-1] - rest.shape[-1])
    return mx.concatenate([rest, mx.full(missing, fill, dtype=per_target.dtype)], axis=-1)


def _numbers(call: Call, class_weight: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """Return `xent.backends.mlx.kernels.Facts.numbers`, (8,)."""
    vocabulary, smoothing = vocabulary_of(call.source), call.options.label_smoothing
    if isinstance(smoothing, mx.array):  # a 16-bit dtype would round the quotient
        smoothing = smoothing.astype(dtype)
    total: Scalar = vocabulary if class_weight is None else class_sum(class_weight)
    scale, spread = call.activation.logit_scale, smoothing / vocabulary
    numbers = [smoothing, call.options.z_loss, _softcap(call), scale, spread, total, 0.0, 0.0]
    if any(isinstance(value, mx.array) for value in numbers):
        return mx.stack([scalar(value, dtype) for value in numbers])
    return mx.array(numbers, dtype=dtype)


def _softcap(call: Call) -> Scalar:
    """Return the softcap as a number or array, bounded by `LARGEST`; 0 for none."""
    cap: Scalar = 0.0 if call.activation.softcap is None else call.activation.softcap
    return mx.minimum(cap, LARGEST) if isinstance(cap, mx.array) else cap
