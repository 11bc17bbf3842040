"""The history of each patched model: whether its logits were computed, for `explain` and for one warning per model.

A step that is not fused computes the right numbers, but takes the memory that `patch` should save. The first such
training step emits a warning with the function that read the logits and the line that called it.
"""

import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from xent.integrations.transformers.replaced import inner, replaced_forward, trl_computes_with

__all__ = [
    "Call",
    "History",
    "begin_call",
    "forget",
    "history_of",
    "is_used",
    "modules_around",
    "note_compiled",
    "note_step",
    "register",
    "why_unused",
]

_INSIDE = ("torch", __name__.rpartition(".")[0])
"""Packages that are skipped in a stack trace, because the user's line is above them."""

_histories: "weakref.WeakKeyDictionary[nn.Module, History]" = weakref.WeakKeyDictionary()
"""Patched model -> its history. Its heads, and copies of them, refer to the same history."""

_by_key: "weakref.WeakValueDictionary[int, History]" = weakref.WeakValueDictionary()
"""Histories by number: torch.compile passes only constants to what it calls while it traces."""


class History:
    """The last training step and the last evaluation of a patched model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.training: Call | None = None
        self.evaluation: Call | None = None
        self.calls = 0
        self.compiled: set[str | None] = set()
        """The reasons of which compiled models have warned, and None if there are any."""
        self.went_past = False
        """Whether the last training step did not call the head."""
        self.key = max(_by_key, default=0) + 1
        _by_key[self.key] = self
        self._calls_before: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._warned = False

    def __deepcopy__(self, memo: Any) -> "History":
        """Return the same object: PEFT copies the head, and its copy belongs to the same model."""
        return self

    def __reduce__(self) -> Any:
        """Pickle only the name."""
        return History, (self.name,)

    def begin(self, training: bool) -> "Call":
        """Return the entry of a new call of the head."""
        call = Call(self, training)
        self.calls += 1
        if training:
            self.training = call
        else:
            self.evaluation = call
        return call

    def warn(self, reason: str, what: str = "takes the memory of its logits, as without xent") -> None:
        """Warn once that training is not fused, and why."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"training this {self.name} {what}: {reason}. "
                "For details, print(xent.integrations.transformers.explain(model))",
                RuntimeWarning,
                stacklevel=2,
            )

    def goes_past(self, optimizer: Optimizer) -> bool:
        """Whether the head was not called since this optimizer's last step, or never, if this is its first step."""
        unused = self._calls_before.get(optimizer, 0) == self.calls and not self.compiled
        self._calls_before[optimizer] = self.calls
        self.went_past = self.went_past and unused
        return unused


@dataclass(eq=False)
class Call:
    """One call of a head. All deferred logits that result from it refer to this object."""

    history: History
    training: bool
    fused: str | None = None
    """If the loss was computed without logits: the operations between head and loss, in words."""
    computed: str | None = None
    """If the logits were computed: the reason."""
    compiled: bool = False

    def note_computed(self, reason: str) -> None:
        """Record that the logits were computed, and why."""
        self.computed = reason
        if self.training and self.fused is None:
            self.history.warn(reason)

    def note_look(self, function: Any) -> None:
        """Record that a function read the logits, and the line that called it."""
        self.note_computed(f"{_name(function)} looked at them {_place(_caller())}")


def register(model: nn.Module, heads: Iterable[Any]) -> None:
    """Start the history of a patched model. If its heads have one, as those of an inner model do, share it."""
    heads = list(heads)
    known = [vars(head)["_xent_history"] for head in heads if "_xent_history" in vars(head)]
    history = known[0] if known else History(type(model).__name__)
    history.name = type(model).__name__
    _histories[model] = history
    for head in heads:
        head._xent_history = history


def forget(model: nn.Module, heads: Iterable[Any]) -> None:
    """Delete the history of a model that is no longer patched."""
    _histories.pop(model, None)
    for head in heads:
        vars(head).pop("_xent_history", None)


def modules_around(head: nn.Module) -> Iterator[nn.Module]:
    """Return the modules of the patched model that has this head."""
    for model, history in list(_histories.items()):
        if history is vars(head).get("_xent_history"):
            yield from model.modules()


def is_used() -> bool:
    """Whether any model is patched."""
    return bool(_histories)


def history_of(model: nn.Module) -> History | None:
    """Return the history of a model."""
    return _histories.get(model)


def begin_call(head: nn.Module) -> Call | None:
    """Return the record of a new call of the head; None for a head that was never patched."""
    history: History | None = vars(head).get("_xent_history")
    return None if history is None else history.begin(head.training and torch.is_grad_enabled())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_compiled(key: int, training: bool, fused: str | None, computed: str | None, begins: bool = False) -> int:
    """Record, while torch.compile traces a model, whether its loss is fused. Warn once per reason if it is not."""
    history = _by_key.get(key)
    if history is None:
        return 0
    call = history.training if training else history.evaluation
    if begins or call is None:
        call = history.begin(training)
        call.compiled = True
        history.compiled.add(None)
    call.fused = call.fused if fused is None else fused
    call.computed = call.computed if computed is None else computed
    if training and call.fused is None and call.computed not in history.compiled:
        history.compiled.add(call.computed)
        warnings.warn(
            f"this compiled training step takes the memory of its logits, as without xent: {computed}",
            RuntimeWarning,
            stacklevel=2,
        )
    return 0


def why_unused(model: Any) -> str:
    """Return why the heads of a patched model were not called."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None and not any("_xent_history" in vars(part) for part in head.modules()):
        return "its head was replaced after patch(model), as resize_token_embeddings does: call patch(model) again"
    replaced = replaced_forward(model)
    if replaced is None:
        return "its head was not called"
    module, forward = replaced
    return f"the forward of its {type(module).__name__} was replaced by {_name(forward)} {_place(forward)}"


def _place(where: Any) -> str:
    """Return "at FILE:LINE" for a frame or a function, or "" if Python does not know them."""
    where = inner(where)
    if isinstance(where, FrameType):
        return f"at {where.f_code.co_filename}:{where.f_lineno} in {where.f_code.co_name}"
    code = getattr(where, "__code__", None)
    return "" if code is None else f"at {code.co_filename}:{code.co_firstlineno}"


def _caller() -> FrameType | None:
    """Return the innermost frame that belongs neither to PyTorch nor to this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not any(name == package or name.startswith(f"{package}.") for package in _INSIDE):
            return frame
        frame = frame.f_back
    return None


def _name(function: Any) -> str:
    """Return a function's name for messages: `Tensor.max`, or `Tensor.T` for the getter of an attribute."""
    function = inner(function)
    owner = getattr(function, "__self__", None)  # the attribute, if the function is its getter
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__" and owner is not None:
        name = getattr(owner, "__name__", name)
    if hasattr(torch.Tensor, name):
        return f"Tensor.{name}"
    return str(getattr(function, "__qualname__", name))


def note_step(optimizer: Optimizer) -> None:
    """Warn if a training step did not call the head: a sign that the forward or the head was replaced."""
    unused = {history for history in set(_histories.values()) if history.goes_past(optimizer)}
    for model, history in list(_histories.items()) if unused else ():
        if history in unused:
            weights = {id(weight) for weight in model.parameters() if weight.requires_grad}
            if any(id(weight) in weights for group in optimizer.param_groups for weight in group["params"]):
                history.went_past = True
                _warn_of_unused(model, history)


def _warn_of_unused(model: nn.Module, history: History) -> None:
    whose = trl_computes_with(model)
    if whose == "trl":
        history.warn(
            "its forward is TRL's, which computes log-probabilities with TRL's kernels until you call "
            "xent.integrations.trl.patch()",
            "does without xent",
        )
    elif whose is None:
        history.warn(why_unused(model))
