"""A call as a list of tensors and one text of field names, which custom operations take; and what is saved of a call.

Every value is a field of a NamedTuple and is found by its name. So a new option changes no schema and no position.
"""

import json
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from xent.backends.torch.refusals import NO_QUANTIZED
from xent.core import call as calls
from xent.core.call import Call, fields_of
from xent.core.spec import QuantizedRows

__all__ = ["Places", "Slot", "parse", "places_of", "put", "split", "take", "text"]


class Slot(NamedTuple):
    """Stands for the tensor with this index in a list."""

    place: int


_KINDS: dict[str, Any] = {name: kind for name, kind in vars(calls).items() if hasattr(kind, "_replace")}
_RECORDS = tuple(_KINDS.values())


def _mapped(node: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """Return a record with changed values of a kind, also in the records that it has."""
    fields = []
    for value in node:
        if isinstance(value, kind):
            fields.append(change(value))
        else:
            fields.append(_mapped(value, kind, change) if isinstance(value, _RECORDS) else value)
    return type(node)(*fields)


def split(call: Call, tensors: list[Tensor]) -> Any:
    """Append the tensors of a call to `tensors`; return the call with a slot in place of each."""

    def slot(value: Tensor) -> Slot:
        tensors.append(value)
        return Slot(len(tensors) - 1)

    return _mapped(call, Tensor, slot)


def text(value: Any) -> str:
    """Return a split call as JSON. `float.hex` is exact.

    `float.hex` and `operator.index` make torch.compile treat a number as a constant: a call with another one is
    compiled again. Dynamo makes a number symbolic that has changed, and would not trace `str` of it.
    """
    if isinstance(value, Slot):
        return '{"slot":' + str(value.place) + "}"
    if isinstance(value, _RECORDS):
        inner = [f'"{name}":' + text(part) for name, part in fields_of(value).items()]
        return "{" + ",".join([f'"type":"{type(value).__name__}"', *inner]) + "}"
    if isinstance(value, tuple):
        return "[" + ",".join([text(part) for part in value]) + "]"
    if isinstance(value, float):
        return '{"hex":"' + value.hex() + '"}'
    if isinstance(value, str):
        return '"' + value + '"'
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(operator.index(value))
    if isinstance(value, QuantizedRows):
        raise NotImplementedError(NO_QUANTIZED)
    return f'"{value.group_name}"'  # a process group


def parse(words: str, tensors: Any) -> Call:
    """Invert `text`, with the tensors in place. Fields are found by name; absent ones have their defaults."""

    def decoded(fields: dict[str, Any]) -> Any:
        if "slot" in fields:
            return tensors[fields["slot"]]
        if "hex" in fields:
            return float.fromhex(fields["hex"])
        return _KINDS[fields.pop("type")](**{name: _tuples(field) for name, field in fields.items()})

    call: Call = json.loads(words, object_hook=decoded)
    return call


def _tuples(value: Any) -> Any:
    return tuple(_tuples(element) for element in value) if isinstance(value, list) else value


Places: TypeAlias = "tuple[tuple[int, Places | None], ...]"
"""The fields of a record that are tensors, with None, or records with tensors, with their own places."""


def places_of(record: Any) -> Places:
    """Return where a record has tensors."""
    places: list[tuple[int, Places | None]] = []
    for index, field in enumerate(record):
        if isinstance(field, Tensor):
            places.append((index, None))
        elif isinstance(field, _RECORDS) and (inner := places_of(field)):
            places.append((index, inner))
    return tuple(places)


def take(record: Any, places: Places, tensors: list[Tensor]) -> Any:
    """Append the tensors of a record to `tensors`; return the record with None in these places."""
    fields = list(record)
    for index, inner in places:
        if inner is None:
            tensors.append(fields[index])
            fields[index] = None
        else:
            fields[index] = take(fields[index], inner, tensors)
    return tuple.__new__(type(record), fields)


def put(record: Any, places: Places, tensors: Iterator[Tensor]) -> Any:
    """Invert `take`."""
    fields = list(record)
    for index, inner in places:
        fields[index] = next(tensors) if inner is None else put(fields[index], inner, tensors)
    return tuple.__new__(type(record), fields)
