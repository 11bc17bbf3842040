"""Detect whether hidden states or weights have changed since the head was called.

Deferred logits that are computed later must not use changed weights. An `Origin` stores the state of each tensor.
Writes increment a tensor's version counter. Fused optimizers do not, so that a hook does it after each step, for the
weights of the heads that defer logits. Writes through `parameter.data` increment nothing. For those, an `Origin` stores
the address of the tensor and a few elements of a weight. Elements are compared only when the logits are read, because
that synchronises with the device.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from xent.integrations.transformers.history import note_step

__all__ = ["Origin", "change", "origin", "unwatch", "watch"]

_steps: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
"""Each head that defers its logits -> the number of optimizer steps on its weights."""
_hook: list[Any] = []


@dataclass(frozen=True, eq=False)
class Origin:
    """A tensor from which logits are computed, and its state when the head was called."""

    name: str
    tensor: Any
    """The tensor, or this process's shard of it. None if FSDP2 frees what it gathered for the call."""
    head: nn.Module | None
    """The head whose optimizer steps count."""
    gathered: bool
    """Whether the weight is whole only during the head's call."""
    state: dict[str, Any]
    """What must stay the same, by the words for a change."""
    sample: Tensor | None
    """Some elements of a weight."""


def origin(name: str, tensor: Tensor, head: nn.Module | None = None, gathered: bool = False) -> Origin:
    """Return the present state of a tensor: "hidden states" or "weights"."""
    head = None if torch.compiler.is_compiling() else head
    local = _local(tensor)
    kept = None if gathered and local is tensor else local
    sample = None if kept is None or name == "hidden states" else _sample(kept).clone()
    return Origin(name, kept, head, gathered, _state(kept, head, gathered), sample)


def _state(tensor: Any, head: nn.Module | None, gathered: bool) -> dict[str, Any]:
    state: dict[str, Any] = {} if head is None else {"changed by an optimizer's step": _steps.get(head, 0)}
    if tensor is not None:
        state["converted to another dtype"] = tensor.dtype
        if torch.compiler.is_compiling():  # Dynamo cannot trace Tensor.is_inference and addresses
            state["written to in place"] = tensor._version
            return state
        if not gathered:
            state["sharded or offloaded"] = not tensor.untyped_storage().nbytes() and tensor.numel() > 0
        state["written to in place"] = 0 if tensor.is_inference() else tensor._version
        if not gathered:
            words = "moved or replaced (parameter.data = ..., model.to(...), merging an adapter)"
            state[words] = tensor.data_ptr()
    return state


def change(origin: Origin, compare_elements: bool) -> str | None:
    """Return in words how the tensor has changed since, or None. Comparing elements synchronises with the device."""
    now = _state(origin.tensor, origin.head, origin.gathered)
    for words, value in origin.state.items():
        if now[words] != value:
            return f"the {origin.name} were {words}"
    if not compare_elements or origin.sample is None:
        return None
    if torch.allclose(_sample(origin.tensor), origin.sample, 0, 0, equal_nan=True):
        return None
    return "the weights were written to through parameter.data (by hand, or by merging an adapter)"


def watch(head: nn.Module) -> None:
    """Count the steps of optimizers that hold a weight of this head."""
    _steps.setdefault(head, 0)
    if not _hook:
        hook: Any = torch.compiler.disable(_after_step)  # traced, it would lose its effect
        _hook.append(register_optimizer_step_post_hook(hook))


def unwatch(*heads: nn.Module) -> bool:
    """Undo `watch`. Return whether no head is left, and remove the hook then."""
    for head in heads:
        _steps.pop(head, None)
    if _hook and not _steps:
        _hook.pop().remove()
    return not _steps


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count a step, also in the weights' version counters. PyTorch calls this after each step of each optimizer."""
    trained = {id(weight) for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad}
    for head in list(_steps):
        weights = [_local(weight) for weight in head.parameters() if id(weight) in trained]
        if weights:
            increment_version(weights)
            _steps[head] += 1
    note_step(optimizer)


def _local(weight: Any) -> Tensor:
    """Return what this process keeps of a weight: its shard in a DTensor, in DeepSpeed's ZeRO-3 or in FSDP1."""
    local: Tensor = getattr(weight, "_local_tensor", weight)
    if not torch.compiler.is_compiling():
        local = getattr(weight._base, "_local_shard", getattr(weight, "ds_tensor", local))
    return local


def _sample(weight: Tensor) -> Tensor:
    """Return a strided view of some hundred elements of a weight."""
    return weight.detach()[tuple([slice(None, None, max(size // 16, 1)) for size in weight.shape])]
