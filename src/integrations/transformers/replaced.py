"""Detect models whose forward was replaced, for example by TRL's trainers.

TRL's `add_fused_lm_head` replaces the forward of a model by one that computes log-probabilities from hidden states and
does not call the head. It looks its kernel up in its own module, where `xent.integrations.trl.patch` installs xent's.
"""

from types import FunctionType
from typing import Any

from torch import nn

__all__ = ["inner", "replaced_forward", "trl_computes_with"]

_TRL_MODULE, _TRL_FUNCTION = "trl.trainer.utils", "_ChunkedLogProbFunction"
_KEPT = ("forward", "_original_forward", "_old_forward")
"""Attributes of a module that may hold a forward other than its class's; accelerate stores the wrapped one in them."""


def replaced_forward(model: nn.Module) -> tuple[nn.Module, Any] | None:
    """Return the first module whose forward was replaced, and the new forward; None if there is none."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if forward is not None and not hasattr(module, "_old_forward"):  # accelerate's forward calls the old one
            return module, forward
    return None


def trl_computes_with(model: nn.Module) -> str | None:
    """Return which library computes the log-probabilities in TRL's forward of a model: "xent" or "trl".

    Return None if the model's forward is not TRL's.
    """
    for module in model.modules():
        for name in _KEPT:
            forward = inner(vars(module).get(name))
            if isinstance(forward, FunctionType) and forward.__globals__.get("__name__") == _TRL_MODULE:
                function = forward.__globals__.get(_TRL_FUNCTION)
                return "xent" if str(getattr(function, "__module__", "")).startswith("xent.") else "trl"
    return None


def inner(function: Any) -> Any:
    """Return the function inside of a functools.partial or a method."""
    function = getattr(function, "func", function)
    return getattr(function, "__func__", function)
