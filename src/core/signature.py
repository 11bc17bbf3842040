"""What decides how a call runs, apart from what it computes with: public functions by name, and slots for values.

A call is a signature and values. The values are its tensors, process groups, and the numbers of its numeric options.
A plan, which follows from the signature, is made of slots in their places: a slot has no value, and `ArraySlot` has no
size of an axis of rows. So a plan cannot depend on either.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from xent.core.call import ArraySlot, Call, Dense, GroupSlot, NumberSlot, QuantizedSlot, replaced
from xent.core.describe import Describer
from xent.core.spec import QuantizedRows
from xent.core.validate import POSITIVE, RANGES

__all__ = ["FUNCTIONS", "Function", "Operands", "binder", "bucket", "is_inside", "register", "with_slots"]


class Function(NamedTuple):
    """A public function: its parameters in order, and how its arguments are described."""

    name: str
    call: Callable[..., Any]
    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    describe: Describer


FUNCTIONS: dict[str, Function] = {}


def register(function: Callable[..., Any], describe: Describer) -> None:
    """Add a public function to the table."""
    parameters = inspect.signature(function).parameters.values()
    defaults = tuple(parameter.default for parameter in parameters)
    names = tuple(parameter.name for parameter in parameters)
    FUNCTIONS[function.__name__] = Function(function.__name__, function, names, defaults, describe)


_NEUTRAL = {"label_smoothing": 0, "z_loss": 0, "logit_scale": 1, "temperature": 1}


def bucket(name: str, number: float) -> str:
    """Return what a signature says of the number of an option."""
    if name == "beta":
        return "forward" if number == 0 else "reverse" if number == 1 else "from_p" if number <= 0.5 else "from_q"
    return "neutral" if number == _NEUTRAL.get(name) else "given"


def is_inside(name: str, number: float) -> bool:
    """Return whether the number of an option is in its range."""
    _, least, most = RANGES[name]
    return (least < number if name in POSITIVE else least <= number) and number <= most and abs(number) <= _FINITE


_FINITE = 1.7976931348623157e308


def with_slots(call: Call, numbers: dict[str, NumberSlot]) -> Call:
    """Return a call that was described with arrays in full, with slots that have no values and no numbers of rows.

    `numbers`: the slots of numeric options by the names of these, "teacher.softcap" for that of a teacher.
    """
    call = _mapped(call, lambda array: array.without_rows())
    activation, target, options = call.activation, call.target, call.options
    named = {name: slot for name, slot in numbers.items() if getattr(activation, name, None) is not None}
    if isinstance(target, Dense):
        own = {name.removeprefix("teacher."): slot for name, slot in numbers.items() if name.startswith("teacher.")}
        if "temperature" in named:
            own["temperature"] = named["temperature"]
        target = replaced(target, activation=replaced(target.activation, **own))
    of_options = {name: slot for name, slot in numbers.items() if name in options._fields}
    activation, options = replaced(activation, **named), replaced(options, **of_options)
    return replaced(call, activation=activation, target=target, options=options)


def _mapped(record: Any, change: Callable[[ArraySlot], ArraySlot]) -> Any:
    """Return a record with other slots of arrays, also in its records and quantized classifiers."""
    fields: list[Any] = []
    for field in record:
        if isinstance(field, ArraySlot):
            fields.append(change(field))
        elif isinstance(field, QuantizedRows):
            fields.append(QuantizedSlot(field.packed.place, field.shape))
        else:
            fields.append(_mapped(field, change) if _is_record(field) else field)
    return type(record)(*fields)


def _is_record(field: Any) -> bool:
    return hasattr(field, "_fields")


Operands = list[Any]
_SLOTS = (ArraySlot, NumberSlot, GroupSlot, QuantizedSlot)


def binder(record: Any) -> Callable[[Operands], Any]:
    """Return a function that returns a record with operands in place of its slots, also of those in its records."""
    kind, fields = type(record), list(record)
    places = [(index, field.place) for index, field in enumerate(fields) if isinstance(field, _SLOTS)]
    records = [(index, binder(field)) for index, field in enumerate(fields) if _is_record(field) and _has_slots(field)]

    def bind(operands: Operands) -> Any:
        bound = fields.copy()
        for index, place in places:
            bound[index] = operands[place]
        for index, inner in records:
            bound[index] = inner(operands)
        return tuple.__new__(kind, bound)

    return bind


def _has_slots(record: Any) -> bool:
    return any(isinstance(field, _SLOTS) or (_is_record(field) and _has_slots(field)) for field in record)
