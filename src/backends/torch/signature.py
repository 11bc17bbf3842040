"""The signature of a call of PyTorch's plain tensors: what may decide how the call runs, and nothing else.

It holds no tensor and no process group, and says of a number only its bucket. Of a tensor it has dtype, device, number
of axes, the sizes of axes that are no rows, whether it is contiguous, whether it begins at a multiple of 16 bytes, and
whether it requires a gradient. Values that Python takes for equal, such as 1, True and 1.0, differ by their types.

Tensors that are not plain have no signature: subclasses, negative views, tensors without memory, and those with a
tangent; nor have calls under a mode, a transform or a tracer.
"""

import dataclasses
import os
from itertools import compress
from operator import is_not
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from xent.backends.proof import Proof
from xent.backends.torch import private
from xent.core.call import ArraySlot, GroupSlot, NumberSlot, Shards
from xent.core.signature import Function, Operands, bucket
from xent.core.spec import Group, LinearTeacher, QuantizedRows, Subset, Support, TopKTeacher, VocabParallel
from xent.core.validate import RANGES, number_of

__all__ = ["Signature", "facts_of", "signature_of", "slot_of", "stand_ins"]

Signature = tuple[object, ...]

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_CONSTANTS = (bool, int, float, str, type(None))
_FIXED = frozenset(("linear_weight", "linear_bias", "weight", "teacher.weight", "teacher.bias", "subset.ids"))
"""The arrays without an axis of rows."""
_LAST = frozenset(("input", "teacher.input", "teacher.ids", "teacher.log_probs"))
"""Those whose last axis is no axis of rows."""
_RECORDS: dict[type, tuple[str, tuple[str, ...]]] = {
    LinearTeacher: ("teacher", ("input", "weight", "bias", "softcap", "logit_scale")),
    TopKTeacher: ("teacher", ("ids", "log_probs", "tail")),
    Support: ("support", ("ids", "offsets")),
    Subset: ("subset", ("teacher", "ids")),
}


_SHARDS: dict[type, tuple[str, ...]] = {
    VocabParallel: ("first", "size", "sequence_parallel"),
    Shards: tuple(field for field in Shards._fields if field != "group"),  # of DTensors
}
"""The fields that are not the group."""


class _NotPlain(Exception):
    """The call has no signature."""


def _is_plain() -> bool:
    """Return whether nothing traces, transforms or watches operations."""
    return not (
        torch.compiler.is_compiling()
        or private.dispatch_modes()
        or private.transforms_active()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
    )


def signature_of(function: Function, arguments: tuple[Any, ...]) -> tuple[Signature, Operands] | None:
    """Return the signature of a call, and its operands: tensors, numbers and process groups. None if it has none."""
    if not _is_plain():
        return None
    kind, axis = arguments[0].device.type, _axis(function, arguments)
    if kind == "meta":
        return None
    # The first two decide which backend "auto" selects.
    parts: list[object] = [
        Proof.remembered,
        os.environ.get("XENT_BACKEND"),
        function.name,
        torch.is_grad_enabled(),
        axis,
    ]
    operands: Operands = []
    if kind != "cpu":
        parts.append(os.environ.get("XENT_CHECK_TARGETS"))  # it decides which numbers the host reads
    if torch.is_autocast_enabled(kind):
        parts.append(torch.get_autocast_dtype(kind))
    try:
        passed = map(is_not, arguments, function.defaults)
        for name, argument in compress(zip(function.names, arguments, strict=True), passed):
            if type(argument) in _PLAIN_TYPES:
                parts.append(_facts_of_plain(argument, name, axis))
                operands.append(argument)
            else:
                _add(name, argument, axis, parts, operands)
    except _NotPlain:
        return None
    return tuple(parts), operands


def stand_ins(
    function: Function, arguments: tuple[Any, ...]
) -> tuple[dict[str, Any], list[str], dict[str, NumberSlot]]:
    """Return the arguments by name with slots in place of tensors and groups, the names passed, and slots of numbers.

    The slots have the places of the operands of `signature_of`. Numbers are still there: they are to be checked.
    """
    axis, count, numbers = _axis(function, arguments), 0, dict[str, NumberSlot]()

    def stand_in(name: str, value: Any) -> Any:
        nonlocal count
        kind, place = type(value), count
        if name.removeprefix("teacher.") in RANGES:
            value = number_of("torch", value)
            kind = type(value)
            if kind is float or kind is int:
                numbers[name] = NumberSlot(place, bucket(name.removeprefix("teacher."), value))
                count += 1
                return value
        if kind in _PLAIN_TYPES:
            count += 1
            return slot_of(value, name, place, axis)
        if kind in _RECORDS:
            prefix, fields = _RECORDS[kind]
            inner = {field: getattr(value, field) for field in fields}
            named = {field: name if field == "teacher" else f"{prefix}.{field}" for field in fields}
            return dataclasses.replace(value, **{field: stand_in(named[field], inner[field]) for field in fields})
        if kind is QuantizedRows:
            count += 1
            packed = value.packed
            facts = packed.dtype, packed.device, packed.requires_grad, False
            return dataclasses.replace(value, packed=ArraySlot(place, tuple(packed.shape), (), *facts))
        if name == "vocab_parallel":
            count += 1
            if kind is Shards:
                return value._replace(group=GroupSlot(place))
            shards = value if kind is VocabParallel else VocabParallel(value)
            return dataclasses.replace(shards, group=GroupSlot(place))
        return value

    described, passed = {}, []
    for name, default, argument in zip(function.names, function.defaults, arguments, strict=True):
        described[name] = argument
        if argument is not default:
            passed.append(name)
            described[name] = stand_in(name, argument)
    return described, passed, numbers


def _axis(function: Function, arguments: tuple[Any, ...]) -> int:
    """Return the axis of the classes of logits."""
    axis = arguments[function.names.index("axis")] if "axis" in function.names else -1
    return axis if type(axis) is int else -1


def _add(name: str, argument: Any, axis: int, parts: list[object], operands: Operands) -> None:
    """Append the part of an argument to a signature, and its operands."""
    kind = type(argument)
    if kind in _PLAIN_TYPES:
        parts.append(_facts_of_plain(argument, name, axis))
        operands.append(argument)
    elif kind in _RECORDS:
        prefix, fields = _RECORDS[kind]
        parts.append((name, kind))
        for field in fields:
            _add(name if field == "teacher" else f"{prefix}.{field}", getattr(argument, field), axis, parts, operands)
    elif (option := name.removeprefix("teacher.")) in RANGES:
        number = number_of("torch", argument)
        kind = type(number)
        if kind is float or kind is int:
            parts.append((name, bucket(option, number)))
            operands.append(number)
        elif kind in _CONSTANTS:
            parts.append((name, kind, number))
        else:
            raise _NotPlain
    elif kind in _CONSTANTS:
        parts.append((name, kind, argument))
    elif kind is QuantizedRows:
        packed = argument.packed
        parts.append((name, kind, *argument.shape, packed.device, packed.requires_grad))
        operands.append(argument)
    elif name == "vocab_parallel":
        _add_shards(argument, parts, operands)
    elif kind in (tuple, list) and all(type(entry) in _CONSTANTS for entry in argument):
        parts.append((name, kind, *[(type(entry), entry) for entry in argument]))
    elif kind in (set, frozenset) and all(type(entry) is str for entry in argument):
        parts.append((name, kind, frozenset(argument)))
    else:
        raise _NotPlain


def _add_shards(argument: Group, parts: list[object], operands: Operands) -> None:
    from xent.backends.torch.shards.ranges import group_of

    group, kind = group_of(argument), type(argument)
    numbers = [getattr(argument, field) for field in _SHARDS.get(kind, ())]
    if any(type(number) not in _CONSTANTS for number in numbers):
        raise _NotPlain
    parts.append(("vocab_parallel", kind, group.group_name, group.rank(), group.size(), *map(type, numbers), *numbers))
    operands.append(group)


def _class_axis(name: str, tensor: Tensor, axis: int) -> int | None:
    """Return the axis of a tensor that is no axis of rows; None if all are, or none."""
    if name in _LAST:
        return -1
    return axis if name in ("logits", "teacher") or (name == "target" and tensor.is_floating_point()) else None


def _facts_of_plain(tensor: Tensor, name: str, axis: int) -> tuple[object, ...]:
    """Return what a signature has of a tensor that is plain; see `facts_of`."""
    if tensor.is_neg() or tensor.is_nested or tensor.is_meta or forward_ad.unpack_dual(tensor).tangent is not None:
        raise _NotPlain
    try:
        return facts_of(tensor, name, axis)
    except RuntimeError:  # it has no memory, or a layout that is not strided
        raise _NotPlain from None


def facts_of(tensor: Tensor, name: str, axis: int) -> tuple[object, ...]:
    """Return what decides how a call with this tensor runs.

    `name`: of the argument, empty for a number in a tensor. `axis`: of the classes of logits.
    """
    aligned, shape = tensor.data_ptr() % 16 == 0, tensor.shape
    sizes: Any = shape if name in _FIXED else len(shape)
    if name not in _FIXED and (of_classes := _class_axis(name, tensor, axis)) is not None:
        sizes = (sizes, shape[of_classes]) if -sizes <= of_classes < sizes else sizes
    return name, tensor.dtype, tensor.device, sizes, tensor.requires_grad, tensor.is_contiguous(), aligned


def slot_of(tensor: Tensor, name: str, place: int, axis: int) -> ArraySlot:
    """Return the slot of a tensor; see `facts_of`."""
    count, of_classes = tensor.dim(), _class_axis(name, tensor, axis)
    rows = (
        [] if name in _FIXED else [other for other in range(count) if of_classes is None or other != of_classes % count]
    )
    return ArraySlot(
        place, tuple(tensor.shape), tuple(rows), tensor.dtype, tensor.device,
        tensor.requires_grad, tensor.is_contiguous(),
    )  # fmt: skip
