"""What somebody put in the place of a model's forward, TRL's trainers among them.

TRL's `add_fused_lm_head` gives a model a forward that takes log-probabilities from the hidden states and never calls
the head. It finds the function that computes them in its own module, where `xent.integrations.trl.patch` puts xent's.
"""

from types import FunctionType
from typing import Any

from torch import nn

__all__ = ["inner", "replaced_forward", "trl_computes_with"]

_TRL_MODULE, _TRL_FUNCTION = "trl.trainer.utils", "_ChunkedLogProbFunction"
_KEPT = ("forward", "_original_forward", "_old_forward")
"""Attributes of a module that hold a forward which is not its class's; accelerate keeps what it wraps in the others."""


def replaced_forward(model: nn.Module) -> tuple[nn.Module, Any] | None:
    """Return the first module whose forward was replaced, and that forward; None if there is none."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if forward is not None and not hasattr(module, "_old_forward"):  # that of accelerate calls the old one
            return module, forward
    return None


def trl_computes_with(model: nn.Module) -> str | None:
    """Return whose function TRL's forward of a model calls for log-probabilities, "xent" or "trl"; or None.

    None is for a model whose forward is not TRL's.
    """
    for module in model.modules():
        for name in _KEPT:
            forward = inner(vars(module).get(name))
            if isinstance(forward, FunctionType) and forward.__globals__.get("__name__") == _TRL_MODULE:
                function = forward.__globals__.get(_TRL_FUNCTION)
                return "xent" if str(getattr(function, "__module__", "")).startswith("xent.") else "trl"
    return None


def inner(function: Any) -> Any:
    """Return the function of a functools.partial or a method."""
    function = getattr(function, "func", function)
    return getattr(function, "__func__", function)
