"""Replacement of attributes of other packages, and the context manager that both `patch` functions return.

Also the names of functions, for messages about what others have replaced, and about what reads logits.
"""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

__all__ = ["Patch", "inner", "name_of", "replace", "restore"]

_replaced: dict[tuple[object, str], tuple[object, object]] = {}
"""(object, attribute) -> the original value and the one that replaces it."""


class Patch(ExitStack):
    """The result of `patch`. As a context manager it undoes the patch at the end, unless there was one before."""

    def __init__(self, undo: Callable[[], None] | None, value: Any = None) -> None:
        """`undo` is None if there was a patch before; `value` is the value of the context."""
        super().__init__()
        self._value = value
        if undo is not None:
            self.callback(undo)

    def __enter__(self) -> Any:
        return self._value


def replace(place: object, name: str, ours: object) -> bool:
    """Replace an attribute. Return False if it was replaced before, and leave it then."""
    if (place, name) in _replaced:
        return False
    _replaced[place, name] = getattr(place, name), ours
    setattr(place, name, ours)
    return True


def restore(place: object, name: str) -> None:
    """Undo `replace`, unless something else has replaced the attribute since."""
    theirs, ours = _replaced.pop((place, name), (None, None))
    if ours is not None and getattr(place, name, None) is ours:
        setattr(place, name, theirs)


def name_of(function: Any) -> str:
    """Return a function's name for messages, for example `Tensor.max`."""
    function = inner(function)
    name = getattr(function, "__name__", type(function).__name__)
    name = function.__self__.__name__ if name == "__get__" else name
    return f"Tensor.{name}" if hasattr(Tensor, name) else str(getattr(function, "__qualname__", name))


def inner(function: Any) -> Any:
    """Return the function inside of decorators such as accelerate's, of a functools.partial and of a method."""
    function = inspect.unwrap(function)
    function = getattr(function, "func", function)
    return getattr(function, "__func__", function)
