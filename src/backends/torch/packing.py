"""A call as a list of tensors and one text of field names, the form in which custom operations take it.

Every value is a field of a NamedTuple and is found by its name. So a new option changes no schema and no position.
"""

import json
from typing import Any, NamedTuple

from torch import Tensor

from xent.core import call as calls
from xent.core.call import Call, fields_of

__all__ = ["Slot", "join", "parse", "split", "text"]


class Slot(NamedTuple):
    """Stands for the tensor with this index in a list."""

    place: int


_KINDS: dict[str, Any] = {name: kind for name, kind in vars(calls).items() if hasattr(kind, "_fields")} | {"Slot": Slot}


def split(node: Any, tensors: list[Tensor]) -> Any:
    """Append the tensors of a call to `tensors`; return the call with a slot in place of each."""
    fields = []
    for value in node:
        if isinstance(value, Tensor):
            tensors.append(value)
            fields.append(Slot(len(tensors) - 1))
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            fields.append(split(value, tensors))
        else:
            fields.append(value)
    return type(node)(*fields)


def join(node: Any, tensors: Any) -> Any:
    """Invert `split`."""
    fields = []
    for value in node:
        if isinstance(value, Slot):
            fields.append(tensors[value.place])
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            fields.append(join(value, tensors))
        else:
            fields.append(value)
    return type(node)(*fields)


def text(value: Any) -> str:
    """Return a split call as JSON. `float.hex` is exact, and makes torch.compile treat a float as a constant."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        inner = [f'"{name}":' + text(one) for name, one in fields_of(value).items()]
        return "{" + ",".join([f'"type":"{type(value).__name__}"', *inner]) + "}"
    if isinstance(value, tuple):
        return "[" + ",".join([text(one) for one in value]) + "]"
    if isinstance(value, float):
        return '{"type":"float","hex":"' + value.hex() + '"}'
    if isinstance(value, str):
        return '"' + value + '"'
    if value is None:
        return "null"
    if isinstance(value, (bool, int)):
        return str(value).lower()
    return f'"{value.group_name}"'  # a process group


def parse(words: str, tensors: Any) -> Call:
    """Invert `text`, with the tensors in place. Fields are found by name; absent ones have their defaults."""

    def made(fields: dict[str, Any]) -> Any:
        kind = fields.pop("type")
        if kind == "Slot":
            return tensors[fields["place"]]
        if kind == "float":
            return float.fromhex(fields["hex"])
        return _KINDS[kind](**{name: _tuples(one) for name, one in fields.items()})

    call: Call = json.loads(words, object_hook=made)
    return call


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value
