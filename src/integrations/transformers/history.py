"""The history of each patched model: whether its logits were computed, for `explain` and for one warning per model.

A step that is not fused computes the right numbers, but takes the memory that `patch` should save. The first such
training step emits a warning with the function that read the logits and the line that called it. The functions that
record something take and return numbers, because torch.compile passes only constants to what it calls while it traces.
"""

import itertools
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

__all__ = [
    "Call",
    "History",
    "begin_call",
    "forget",
    "history_of",
    "inner",
    "looks",
    "modules_around",
    "note",
    "note_step",
    "register",
    "trl_computes_with",
    "why_unused",
]

_INSIDE = ("torch", __name__.rpartition(".")[0])
"""Packages that are skipped in a stack trace, because the user's line is above them."""

_histories: "weakref.WeakKeyDictionary[nn.Module, History]" = weakref.WeakKeyDictionary()
"""Patched model -> its history. Its heads, and copies of them, refer to the same history."""

_by_key: "weakref.WeakValueDictionary[int, History]" = weakref.WeakValueDictionary()
_keys = itertools.count(1)


@dataclass(eq=False)
class Call:
    """One call of a head."""

    number: int
    compiled: bool
    fused: str | None = None
    """If the loss was computed without logits: the operations between head and loss, in words."""
    computed: str | None = None
    """If the logits were computed: the reason."""


class History:
    """The last training step and the last evaluation of a patched model."""

    def __init__(self, name: str) -> None:
        self.name, self.calls, self.key = name, 0, next(_keys)
        self.last: dict[bool, Call] = {}
        """The last call in training (True) and in evaluation (False)."""
        self.compiled = False
        """Whether any call was compiled."""
        self.went_past = False
        """Whether the last training step did not call the head."""
        self._calls_before: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._warned = False
        _by_key[self.key] = self

    def __deepcopy__(self, memo: Any) -> "History":
        """Return the same object: PEFT copies the head, and its copy belongs to the same model."""
        return self

    def __reduce__(self) -> Any:
        """Pickle only the name."""
        return History, (self.name,)

    def warn(self, reason: str | None, unused: bool = False) -> None:
        """Warn once that training is not fused, or does not use xent, and why."""
        if self._warned:
            return
        self._warned = True
        last = self.last.get(True)
        compiled = last is not None and last.compiled
        said = f"training this {self.name} takes the memory of its logits, as without xent"
        if unused:
            said = f"training this {self.name} does without xent"
        elif compiled:
            said = "this compiled training step takes the memory of its logits, as without xent"
        details = "For details, print(xent.integrations.transformers.explain(model))"
        warnings.warn(f"{said}: {reason}. {details}", RuntimeWarning, stacklevel=2)

    def goes_past(self, optimizer: Optimizer) -> bool:
        """Whether the head was not called since this optimizer's last step, or never, if this is its first step."""
        unused = self._calls_before.get(optimizer, 0) == self.calls and not self.compiled
        self._calls_before[optimizer] = self.calls
        self.went_past = self.went_past and unused
        return unused


def register(model: nn.Module, heads: Iterable[Any]) -> History:
    """Return the history of a patched model. If its heads have one, as those of an inner model do, share it."""
    known = [vars(head)["_xent_history"] for head in heads if "_xent_history" in vars(head)]
    history: History = known[0] if known else History("")
    history.name = type(model).__name__
    _histories[model] = history
    return history


def forget(model: nn.Module) -> None:
    """Delete the history of a model that is no longer patched."""
    _histories.pop(model, None)


def history_of(model: nn.Module) -> History | None:
    """Return the history of a model."""
    return _histories.get(model)


def modules_around(head: nn.Module) -> Iterator[nn.Module]:
    """Return the modules of the patched model that has this head."""
    for model, history in list(_histories.items()):
        if history is vars(head).get("_xent_history"):
            yield from model.modules()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def begin_call(key: int, training: bool, compiled: bool, computed: str | None) -> tuple[int, int]:
    """Record a call of a head, and why it computes its logits. Return what `note` takes."""
    history = _by_key[key]
    history.calls += 1
    history.compiled = history.compiled or compiled
    history.last[training] = Call(history.calls, compiled)
    call = key, history.calls
    if computed is not None:
        note(call, computed=computed)
    return call


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note(call: tuple[int, int], fused: str | None = None, computed: str | None = None) -> int:
    """Record that the loss was fused, or why the logits were computed. Warn in training if it is not fused."""
    history = _by_key.get(call[0])
    for training, last in history.last.items() if history is not None else ():
        if last.number == call[1] and history is not None:
            last.fused = last.fused if fused is None else fused
            last.computed = last.computed if computed is None else computed
            if training and last.fused is None:
                history.warn(computed)
    return 0


def looks(function: Any) -> str:
    """Return in words that a function reads the logits, and the line that called it."""
    if torch.compiler.is_compiling():
        return "what is compiled looks at them"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(tuple(f"{name}." for name in _INSIDE)):
        frame = frame.f_back
    where = "" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return f"{_name(function)} looked at them {where}"


def _name(function: Any) -> str:
    """Return a function's name for messages: `Tensor.max`, or `Tensor.T` for the getter of an attribute."""
    function = inner(function)
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return f"Tensor.{name}" if hasattr(torch.Tensor, name) else str(getattr(function, "__qualname__", name))


def inner(function: Any) -> Any:
    """Return the function inside of a functools.partial or a method."""
    function = getattr(function, "func", function)
    return getattr(function, "__func__", function)


def note_step(optimizer: Optimizer) -> None:
    """Warn if a training step did not call the head: a sign that the forward or the head was replaced."""
    unused = {history for history in set(_histories.values()) if history.goes_past(optimizer)}
    trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]} if unused else set()
    for model, history in list(_histories.items()) if unused else ():
        if history in unused and any(weight.requires_grad and id(weight) in trained for weight in model.parameters()):
            history.went_past = True
            whose = trl_computes_with(model)
            if whose == "trl":
                history.warn(
                    "its forward is TRL's, which computes log-probabilities with TRL's kernels until you call "
                    "xent.integrations.trl.patch()",
                    unused=True,
                )
            elif whose is None:
                history.warn(why_unused(model))


def why_unused(model: Any) -> str:
    """Return why the heads of a patched model were not called."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None and not any("_xent_history" in vars(part) for part in head.modules()):
        return "its head was replaced after patch(model), as resize_token_embeddings does: call patch(model) again"
    for module in model.modules():
        forward = vars(module).get("forward")
        if forward is not None and not hasattr(module, "_old_forward"):  # accelerate's forward calls the old one
            code = getattr(inner(forward), "__code__", None)
            where = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
            return f"the forward of its {type(module).__name__} was replaced by {_name(forward)}{where}"
    return "its head was not called"


_TRL_MODULE, _TRL_FUNCTION = "trl.trainer.utils", "_ChunkedLogProbFunction"
_KEPT = ("forward", "_original_forward", "_old_forward")
"""Attributes of a module that may hold a forward other than its class's; accelerate stores the wrapped one in them."""


def trl_computes_with(model: nn.Module) -> str | None:
    """Return which library computes the log-probabilities in TRL's forward of a model: "xent" or "trl".

    TRL's `add_fused_lm_head` replaces the forward of a model by one that computes log-probabilities from hidden states
    and does not call the head. It looks its kernel up in its own module, where `xent.integrations.trl.patch` installs
    xent's. Return None if the model's forward is not TRL's.
    """
    for module in model.modules():
        for name in _KEPT:
            forward = inner(vars(module).get(name))
            if isinstance(forward, FunctionType) and forward.__globals__.get("__name__") == _TRL_MODULE:
                function = forward.__globals__.get(_TRL_FUNCTION)
                return "xent" if str(getattr(function, "__module__", "")).startswith("xent.") else "trl"
    return None
