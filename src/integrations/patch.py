"""The context manager that both `patch` functions return."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

__all__ = ["Patch"]


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
