"""The history of a patched model: whether and why it computed its logits, for `explain` and for one warning per model.

A step that is not fused computes the right numbers, but takes the memory that `patch` should save. The functions that
record something take and return numbers, because torch.compile passes only constants to what it calls while it traces.
"""

import itertools
import sys
import warnings
import weakref
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from xent.integrations.patch import name_of

__all__ = ["History", "begin_call", "looks", "note"]

_INSIDE = ("torch.", f"{__name__.rpartition('.')[0]}.")
"""Packages that are skipped in a stack trace, because the user's line is above them."""

_by_key: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""The histories, and the last calls of their heads."""
_keys = itertools.count(1)


@dataclass(eq=False)
class _Call:
    """One call of a head."""

    history: "History"
    training: bool
    compiled: bool
    fused: str | None = None
    """If the loss was computed without logits: the operations between head and loss, in words."""
    computed: str | None = None
    """If the logits were computed: the reason."""


class History:
    """The last training step and the last evaluation of a patched model."""

    def __init__(self, name: str) -> None:
        self.name, self.key = name, next(_keys)
        self.head = ""
        """A sentence about a head that is not linear itself, such as PEFT's."""
        self.last: dict[bool, _Call] = {}
        """The last call in training (True) and in evaluation (False)."""
        self.stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """The optimizers that made a step since the last call of the head."""
        self.went_past = False
        """Whether a training step since then did not call the head."""
        self._warned = False
        _by_key[self.key] = self

    def __deepcopy__(self, memo: object) -> "History":
        """Return the same object: PEFT copies the head, and its copy belongs to the same model."""
        return self

    def __reduce__(self) -> tuple[type, tuple[str]]:
        """Pickle only the name."""
        return History, (self.name,)

    def warn(self, reason: str, unused: bool = False) -> None:
        """Warn once that training is not fused, or does not use xent, and why."""
        if self._warned:
            return
        self._warned = True
        compiled = True in self.last and self.last[True].compiled
        subject = "this compiled training step" if compiled else f"training this {self.name}"
        what = "is not using xent" if unused else "takes the memory of its logits, as without xent"
        warnings.warn(
            f"{subject} {what}: {reason}.{self.head} For details, print(xent.integrations.transformers.explain(model))",
            RuntimeWarning,
            stacklevel=2,
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def begin_call(key: int, training: bool, compiled: bool, computed: str | None) -> int:
    """Record a call of a head, and why it computes its logits. Return what `note` takes."""
    history, call = _by_key[key], next(_keys)
    history.went_past = False
    history.stepped.clear()
    history.last[training] = _by_key[call] = _Call(history, training, compiled)
    if computed is not None:
        note(call, "computed", computed)
    return call


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note(call: int, what: str, message: str) -> int:
    """Record what is known of a call, "fused" or "computed". Warn if training computes logits, also after the loss."""
    last = _by_key.get(call)
    if last is not None:
        setattr(last, what, message)
        if last.training and what == "computed":
            last.history.warn(message)
    return 0


def looks(function: Any) -> str:
    """Return in words that a function reads the logits, and the line that called it."""
    if torch.compiler.is_compiling():
        return "what is compiled looks at them"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(_INSIDE):
        frame = frame.f_back
    if frame is None:
        return f"{name_of(function)} looked at them"
    code, owner = frame.f_code, frame.f_locals.get("self")
    of = f" of {type(owner).__name__}" if owner is not None else ""
    return f"{name_of(function)} looked at them at {code.co_filename}:{frame.f_lineno} in {code.co_name}{of}"
