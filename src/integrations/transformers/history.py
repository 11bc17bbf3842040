"""What became of the logits of patched models: what `explain` says, and what is warned of once a model.

A step that is not fused gives the right numbers and takes the memory that patch was called to save. The first one is
said, with the function and the line that looked at the logits.
"""

import sys
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from xent.integrations.transformers.replaced import inner, replaced_forward, trl_computes_with

__all__ = [
    "Call",
    "History",
    "Outcome",
    "begin_call",
    "forget",
    "history_of",
    "note_compiled",
    "register",
    "why_unused",
]

_INSIDE = ("torch", __name__.rpartition(".")[0])
"""Packages whose lines are nobody's decision."""

_histories: "weakref.WeakKeyDictionary[nn.Module, History]" = weakref.WeakKeyDictionary()
"""Patched model -> its history, which its heads and their copies hold as well."""

_compiled: set[str] = set()
"""What was said of compiled models; with an empty text if one was compiled at all."""


@dataclass
class Outcome:
    """What became of the logits of one forward pass."""

    fused: str | None = None
    """What was recorded between head and loss, if the loss was computed without them."""
    computed: str | None = None
    """Why they were computed, if they were."""
    seen: bool = False
    """Whether there was one."""


class History:
    """The last training step and the last evaluation of a patched model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.training, self.evaluation = Outcome(), Outcome()
        self.calls = 0
        self.went_past = False
        """Whether the last step of training came without a call of the head."""
        self._calls_before: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._warned = False

    def __deepcopy__(self, memo: Any) -> "History":
        """Return the same: PEFT trains a copy of the head, and a copy of the model is no other model."""
        return self

    def __reduce__(self) -> Any:
        """Pickle the name alone."""
        return History, (self.name,)

    def warn(self, reason: str, what: str = "takes the memory of its logits, as without xent") -> None:
        """Say, once, why training is not fused."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"training this {self.name} {what}: {reason}. "
                "print(xent.integrations.transformers.explain(model)) says more",
                RuntimeWarning,
                stacklevel=2,
            )

    def goes_past(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer has stepped twice without a call of the head in between, or once without any."""
        before = self._calls_before.get(optimizer, 0)
        self._calls_before[optimizer] = self.calls
        self.went_past = before == self.calls and not _compiled
        return self.went_past


class Call:
    """One call of a head, which all logits made from it know."""

    def __init__(self, history: History, training: bool, caller: FrameType | None) -> None:
        self._history = history
        self._training = training
        # The frame itself would keep its tensors alive.
        self._caller = None if caller is None else (id(caller), caller.f_code)
        self._outcome = Outcome(seen=True)
        history.calls += 1
        if training:
            history.training = self._outcome
        else:
            history.evaluation = self._outcome

    def note_fused(self, recorded: str) -> None:
        """Note that a loss was computed without the logits."""
        self._outcome.fused = recorded

    def note_computed(self, reason: str) -> None:
        """Note that the logits were computed."""
        self._outcome.computed = reason
        if self._training and self._outcome.fused is None:
            self._history.warn(reason)

    def note_look(self, function: Any) -> None:
        """Note that the logits were computed for a function, and where that was called."""
        self.note_computed(f"{_name(function)} looked at them {_place(_caller())}")

    def is_running(self) -> bool:
        """Whether the function that called the head has not returned yet."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if (id(frame), frame.f_code) == self._caller:
                return True
            frame = frame.f_back
        return False


def register(model: nn.Module, heads: Iterable[Any]) -> None:
    """Begin the history of a model that is patched, or go on with that of its heads, as of a model inside of it."""
    heads = list(heads)
    known = [vars(head)["_xent_history"] for head in heads if "_xent_history" in vars(head)]
    history = known[0] if known else History(type(model).__name__)
    history.name = type(model).__name__
    _histories[model] = history
    for head in heads:
        head._xent_history = history


def forget(model: nn.Module, heads: Iterable[Any]) -> None:
    """End the history of a model that is not patched any more."""
    _histories.pop(model, None)
    for head in heads:
        vars(head).pop("_xent_history", None)


def history_of(model: nn.Module) -> History | None:
    """Return the history of a model."""
    return _histories.get(model)


def begin_call(head: nn.Module) -> Call | None:
    """Return what a call of the head is noted in; nothing for a head that was never patched."""
    history: History | None = vars(head).get("_xent_history")
    return None if history is None else Call(history, head.training and torch.is_grad_enabled(), _caller())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_compiled(reason: str) -> int:
    """Note, while torch.compile traces, that it does, and say once why what it compiles computes logits."""
    if reason not in _compiled:
        _compiled.update(("", reason))
        if reason:
            warnings.warn(
                f"this compiled training step takes the memory of its logits, as without xent: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )
    return 0


def why_unused(model: Any) -> str:
    """Return why nothing has called the heads of a patched model."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None and not any("_xent_history" in vars(part) for part in head.modules()):
        return "its head was replaced after patch(model), as resize_token_embeddings does: call patch(model) again"
    replaced = replaced_forward(model)
    if replaced is None:
        return "its head was not called"
    module, forward = replaced
    return f"the forward of its {type(module).__name__} was replaced by {_name(forward)} {_place(forward)}"


def _place(where: Any) -> str:
    """Return file and line of a frame or a function, as "at FILE:LINE"; nothing where Python does not know them."""
    where = inner(where)
    if isinstance(where, FrameType):
        return f"at {where.f_code.co_filename}:{where.f_lineno} in {where.f_code.co_name}"
    code = getattr(where, "__code__", None)
    return "" if code is None else f"at {code.co_filename}:{code.co_firstlineno}"


def _caller() -> FrameType | None:
    """Return the frame nearest to here that belongs neither to PyTorch nor to this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not any(name == package or name.startswith(f"{package}.") for package in _INSIDE):
            return frame
        frame = frame.f_back
    return None


def _name(function: Any) -> str:
    """Return what a function is called: `Tensor.max`, `Tensor.T` for the getter of an attribute."""
    function = inner(function)
    owner = getattr(function, "__self__", None)  # of a getter: the attribute
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__" and owner is not None:
        name = getattr(owner, "__name__", name)
    if hasattr(torch.Tensor, name):
        return f"Tensor.{name}"
    return str(getattr(function, "__qualname__", name))


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Say if a step of training went past the head, which is how a replaced forward or head shows."""
    unused = {history for history in set(_histories.values()) if history.goes_past(optimizer)}
    for model, history in list(_histories.items()) if unused else ():
        if history in unused:
            weights = {id(weight) for weight in model.parameters() if weight.requires_grad}
            history.went_past = any(
                id(weight) in weights for group in optimizer.param_groups for weight in group["params"]
            )
            if history.went_past:
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


_hook: Any = torch.compiler.disable(_note_step)
register_optimizer_step_post_hook(_hook)
