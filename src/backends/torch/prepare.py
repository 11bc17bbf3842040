"""Prepare a call for the loop: classes last, one value per row, shifts and heads applied, numbers and targets checked.

`typed` and `classes_last` are the part that autograd and compilers see. `prepare` is the rest, which custom operations
run too. Preparing a prepared call changes nothing.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import wide
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.memory import cast
from xent.backends.torch.plan import compute_of
from xent.backends.torch.portable.facts import weights_of
from xent.backends.torch.refusals import check_rows
from xent.core.call import (
    Allowed,
    Call,
    Classes,
    Dense,
    Given,
    Options,
    Probabilities,
    Product,
    QuantizedSlot,
    TopK,
    gathered,
    replaced,
    vocabulary_of,
)
from xent.core.spec import LARGEST, ROW_STATS, QuantizedRows, Stats, bounded
from xent.core.validate import check_options, check_subset, outside, repeats

__all__ = ["classes_last", "is_last", "is_per_row", "is_prepared", "prepare", "rows_of", "shaped", "typed"]

_LEAST = {torch.float64: 2.0**-300, torch.float32: 2.0**-60}
"""A trained scale closer to 0 is replaced by this. The rounded x is 0 in both cases, but g, which has the factor s, is
not, and the gradient of the scale is a sum of g z / s."""


def typed(call: Call) -> Call:
    """Return the call with the dtypes of its matrix products."""
    source, target = call.source, call.target
    if isinstance(source, Product):
        source = _with_dtype(source, "linear_")
    if isinstance(target, Dense) and isinstance(target.source, Product):
        target = replaced(target, source=_with_dtype(target.source, "teacher."))
    return replaced(call, source=source, target=target)


def is_last(call: Call) -> bool:
    """Return whether the classes of all logits are on the last axis."""
    sources = [call.source, call.target.source] if isinstance(call.target, Dense) else [call.source]
    return all(source.axis == source.logits.dim() - 1 for source in sources if isinstance(source, Given))


def classes_last(call: Call) -> Call:
    """Return the call with the classes of logits, and of class probabilities, on the last axis."""
    source, target = call.source, call.target
    if isinstance(source, Given):
        if isinstance(target, Probabilities) and source.axis != source.logits.dim() - 1:
            target = replaced(target, probs=target.probs.movedim(source.axis, -1))
        source = _moved(source)
    if isinstance(target, Dense) and isinstance(target.source, Given):
        target = replaced(target, source=_moved(target.source))
    return replaced(call, source=source, target=target)


def _moved(source: Given) -> Given:
    if source.axis == source.logits.dim() - 1:
        return source
    return replaced(source, logits=source.logits.movedim(source.axis, -1), axis=source.logits.dim() - 1)


def _with_dtype(source: Product, prefix: str) -> Product:
    """Select the dtype of the matrix products: autocast's, as for F.linear, otherwise that of all arguments."""
    if source.dtype is not None:
        return source
    hidden, dtype, device = source.input, source.input.dtype, source.input.device.type
    weight = hidden if isinstance(source.weight, (QuantizedRows, QuantizedSlot)) else source.weight
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    if autocast and torch.float64 not in (dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(device)
    else:
        for name, tensor in (("weight", weight), ("bias", source.bias)):
            if tensor is not None and tensor.dtype != dtype:
                more = "; torch.autocast does not convert float64" if autocast else ", or call under torch.autocast"
                raise TypeError(
                    f"{prefix}{name} must have the dtype of {prefix.removeprefix('linear_')}input, {dtype}, outside "
                    f"of torch.autocast; got {tensor.dtype}: cast one to the dtype of the other{more}"
                )
    if prefix == "teacher.":  # its logits are not rounded
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
    return replaced(source, dtype=str(dtype).removeprefix("torch."))


def rows_of(call: Call) -> tuple[int, ...]:
    """Return the shape of a result per row, for a call with classes last."""
    source, target, options = call.source, call.target, call.options
    if isinstance(target, (Classes, Allowed)):
        rows = tuple(target.ids.shape)
    elif isinstance(target, Probabilities):
        rows = tuple(target.probs.shape[:-1])
    else:
        rows = tuple((source.logits if isinstance(source, Given) else source.input).shape[:-1])
    return rows if options.heads is None else (options.heads, *rows)


def is_per_row(name: str, options: Options) -> bool:
    """Return whether a result is one per row: the loss, or a statistic."""
    if name in ("loss", "z_loss"):
        return options.reduction == "none"
    return name in ROW_STATS or (name in ("accuracy", "rank") and options.is_log_probs)


def is_prepared(call: Call) -> bool:
    """Return whether a call, or one with slots, is already in the form of the loop."""
    target, activation, options = call.target, call.activation, call.options
    if options.shift != 0 or _has_tensor_numbers(call) or call.shards is not None:
        return False
    if activation.temperature is not None or options.sample_weight is not None:
        return False
    return isinstance(target, Classes) and target.ids.dim() == 1 and target.ids.is_contiguous()


def _has_tensor_numbers(call: Call) -> bool:
    """Return whether a number among the options is a tensor."""
    activation, options = call.activation, call.options
    numbers = (activation.logit_scale, activation.softcap, options.label_smoothing, options.z_loss, options.normalizer)
    return any(hasattr(number, "requires_grad") for number in numbers)


def shaped(results: list[Tensor], call: Call) -> tuple[Tensor, Stats]:
    """Return the loss and the statistics, those per row in the shape of the rows of a call with classes last."""
    options, loss = call.options, results[0]
    if options.reduction != "none" and not options.stats:
        return loss, _NO_STATS
    rows = rows_of(call)
    if options.reduction == "none":
        loss = loss.view(rows)
    stats = zip(options.stats, results[1:], strict=True)
    return loss, Stats(**{name: each.view(rows) if is_per_row(name, options) else each for name, each in stats})


_NO_STATS = Stats()


def prepare(
    call: Call, needs: tuple[bool, ...], trains_scale: bool = False, checks: bool = True, traced: bool = False
) -> Call:
    """Return a call with the classes of logits last in the form of the loop.

    `needs`: which leaves need a gradient. `trains_scale`: whether the logit scale needs one. `checks`: values that the
    host can see are checked. `traced`: Python numbers are checked too, because no public function has done it.
    """
    if is_prepared(call) and not traced:
        return call
    source, target, activation, options, shards = call
    moves, converts = options.shift != 0, traced or _has_tensor_numbers(call)
    device, sum_dtype = (source.logits if isinstance(source, Given) else source.input).device, wide(compute_of(source))
    looks, rows = device.type == "cpu" or looks_at_targets(device), rows_of(call)
    shifts = options.shift if isinstance(options.shift, tuple) else (options.shift,)
    original = call

    def each(array: Tensor, fill: float, dtype: torch.dtype | None = None) -> Tensor:
        """Return values (..., T) of the rows, (N,), shifted for each head."""
        array = array if dtype is None else cast(array, dtype)
        if moves:
            more = [array.new_full((*array.shape[:-1], min(shift, array.shape[-1])), fill) for shift in shifts]
            parts = [torch.cat((array[..., shift:], end), -1) for shift, end in zip(shifts, more, strict=True)]
            array = parts[0] if options.heads is None else torch.stack(parts)
        return array.reshape(-1).contiguous()

    if isinstance(target, Classes):
        target = Classes(each(target.ids, options.ignore_index, torch.int64 if moves else None))
    elif isinstance(target, Allowed):
        target = _support(target, looks, each, rows, options)
    elif isinstance(target, Dense) and target.ids is not None:
        target = _restricted(target, looks, sum_dtype)
    elif isinstance(target, TopK):
        ids, log_probs = (array.reshape(-1, array.shape[-1]) for array in target[:2])
        target = TopK(ids, log_probs, target.tail)
    elif isinstance(target, Probabilities) and moves:
        shape = rows if options.heads is None else rows[1:]
        places = torch.arange(math.prod(shape), device=device).view(shape)
        target = Probabilities(target.probs, each(places, -1))
    if activation.temperature is not None:
        divisor = each(activation.temperature.expand(rows), 1, sum_dtype)
        divisor = divisor.masked_fill(~(divisor > 0), torch.nan).clamp_(max=LARGEST)
        activation = activation._replace(temperature=divisor)
    weight = options.sample_weight
    if weight is not None:
        weight = each(weight, 0, sum_dtype)
    elif moves and isinstance(target, (Dense, TopK)):
        weight = each(torch.ones(rows, dtype=sum_dtype, device=device), 0)
    if weight is not options.sample_weight or moves:
        options = options._replace(sample_weight=weight, shift=0)
    call = Call(source, target, activation, options, shards)
    if converts:
        call = _with_numbers(call, sum_dtype, trains_scale)
    if shards is not None:
        call = _in_shards(call, math.prod(rows), needs)
    if looks and checks:
        check_rows(original, _size(call), min(shifts))
    return call if options.heads is None else _with_heads(call, sum_dtype)


def _support(
    target: Allowed, looks: bool, each: Callable[..., Tensor], rows: tuple[int, ...], options: Options
) -> Allowed:
    """Return the support of each row. Offsets whose values have not been checked must not cause reads out of bounds."""
    ids = each(target.ids, options.ignore_index, torch.int64)
    if target.begin is not None:
        return target
    begin, end, broken = target.offsets[:-1], target.offsets[1:], None
    if not looks:
        offsets = target.offsets.to(torch.int64)
        rising = offsets.clamp(0, len(target.classes)).cummax(0).values
        rising[:1].zero_()  # a number assigned to an element would be copied from the host
        rising[-1:].fill_(len(target.classes))
        begin, end, broken = rising[:-1], rising[1:], (rising != offsets).any()
    begin, end = (each(array.view(rows), 0, torch.int64) for array in (begin, end))
    return Allowed(ids, target.classes, target.offsets, begin, end, broken)


def _restricted(target: Dense, looks: bool, sum_dtype: torch.dtype) -> Dense:
    """Return a teacher with the student's classes only; invalid classes that the host cannot see make it NaN."""
    ids, size, activation = target.ids.to(torch.int64), vocabulary_of(target.source), target.activation
    if looks:
        check_subset(ids.cpu().numpy(), target.source)
    else:
        ordered, unchecked = ids.sort().values, ids
        ids = unchecked.clamp(0, max(size - 1, 0))
        wrong = (ids != unchecked).any() | repeats(ordered)
        scale = activation.logit_scale
        if not isinstance(scale, Tensor):
            scale = torch.full((), scale, dtype=sum_dtype, device=ids.device)
        activation = activation._replace(logit_scale=torch.where(wrong, torch.nan, scale.to(sum_dtype)))
    source = target.source
    if isinstance(source, Product):
        source = source._replace(
            weight=source.weight.detach(), bias=None if source.bias is None else source.bias.detach()
        )
    return Dense(gathered(source, ids), activation)


def _with_numbers(call: Call, sum_dtype: torch.dtype, trains_scale: bool) -> Call:
    """Replace 0-d tensors by numbers, and check these, where no device has to be waited for."""
    activation, options = call.activation, call.options
    numbers = {"logit_scale": activation.logit_scale, "softcap": activation.softcap}
    numbers |= {name: getattr(options, name) for name in ("label_smoothing", "z_loss", "normalizer")}
    for name, value in numbers.items():
        if isinstance(value, Tensor):
            looks = looks_at_targets(value.device)
            numbers[name] = value.item() if looks else cast(value.detach(), sum_dtype)
    check_options("torch", {name: value for name, value in numbers.items() if not isinstance(value, Tensor)})
    cap, scale = numbers.pop("softcap"), numbers.pop("logit_scale")
    cap = cap.clamp(max=LARGEST) if isinstance(cap, Tensor) else bounded(cap)
    if trains_scale:
        least = _LEAST[sum_dtype]
        if isinstance(scale, Tensor):
            scale = torch.where(scale.abs() < least, torch.full_like(scale, least).copysign(scale), scale)
        elif abs(scale) < least:
            scale = math.copysign(least, scale)
    activation = activation._replace(logit_scale=scale, softcap=cap)
    return call._replace(activation=activation, options=options._replace(**numbers))


def _in_shards(call: Call, count: int, needs: tuple[bool, ...]) -> Call:
    """Find the classes of this rank, and cut the padding from class weights and class probabilities."""
    from xent.backends.torch.shards.ranges import ranges_of  # needs torch.distributed

    (shards, width), target, options = ranges_of(call, count, needs), call.target, call.options
    if options.weight is not None:
        options = options._replace(weight=options.weight[:width])
    if isinstance(target, Probabilities):
        target = target._replace(probs=target.probs[..., :width])
    elif isinstance(target, Dense) and isinstance(target.source, Given):
        target = target._replace(source=target.source._replace(logits=target.source.logits[..., :width]))
    return call._replace(target=target, options=options, shards=shards)


def _with_heads(call: Call, sum_dtype: torch.dtype) -> Call:
    """Make the sum of the heads' losses one sum over all rows: a row has the weight of its head over its divisor."""
    options, target, heads = call.options, call.target, call.options.heads or 1
    assert isinstance(target, (Classes, Probabilities))
    ids = target.ids if isinstance(target, Classes) else None
    counted: Any = target.order >= 0 if isinstance(target, Probabilities) else ids != options.ignore_index
    sample_weight, factors = options.sample_weight, options.head_weight
    weight = (counted.to(sum_dtype) if sample_weight is None else sample_weight.masked_fill(~counted, 0)).view(
        heads, -1
    )
    if options.reduction == "mean":
        divisor = options.normalizer
        if divisor is None:
            parts = weight
            if ids is not None and options.weight is not None:
                parts = weight * weights_of(options.weight.to(sum_dtype), ids, call.shards).view(heads, -1)
            if ids is not None:  # invalid targets do not count
                parts = parts * ~outside(ids, _size(call)).view(heads, -1)
            divisor = parts.sum(1, keepdim=True)
        elif not isinstance(divisor, Tensor):
            divisor = torch.full((), divisor, dtype=sum_dtype, device=weight.device)
        weight = torch.where(divisor == 0, 0, weight / divisor)  # a reciprocal could overflow
    if factors is not None:
        weight = torch.stack([row * factor for row, factor in zip(weight, factors, strict=True)])
    reduction = "none" if options.reduction == "none" else "sum"
    options = options._replace(normalizer=None, heads=None, head_weight=None)
    return call._replace(options=options._replace(reduction=reduction, sample_weight=weight.reshape(-1)))


def _size(call: Call) -> int:
    """Return the number V of classes over all ranks."""
    if call.shards is None:
        return vocabulary_of(call.source)
    assert call.shards.size is not None
    return call.shards.size
