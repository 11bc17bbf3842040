"""Detect whether hidden states or weights have changed since the head was called.

Deferred logits that are computed later must not use changed weights. Writes increment a tensor's version counter.
Fused optimizers do not, so that a hook does it after each step, for the weights of the heads that defer logits. Writes
through `parameter.data` increment nothing. For those, an `Origin` stores the address of each tensor and a few elements
of each weight. Elements are compared only when the logits are read, because that synchronises with the device.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from xent.integrations.transformers.history import Call, is_used, note_step

__all__ = ["Origin", "change", "origin", "unwatch", "watch"]

_heads: "weakref.WeakKeyDictionary[nn.Module, tuple[int, str]]" = weakref.WeakKeyDictionary()
"""Each head that defers its logits -> the number of optimizer steps on its weights, and the last optimizer's class."""
_hook: list[Any] = []


@dataclass(frozen=True, eq=False)
class Origin:
    """The tensors from which logits are computed, and their state when the head was called."""

    inputs: tuple[Tensor, ...]
    """Hidden states, and other tensors that are no parameters."""
    weights: tuple[Tensor, ...]
    """Weights, or their local shards."""
    head: nn.Module | None
    gathered: bool
    """Whether the weights are whole only during the head's call."""
    versions: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    addresses: tuple[int, ...] | None
    """None if a compiled graph created the logits."""
    samples: tuple[Tensor, ...]
    """Some elements of each weight."""
    steps: int
    """The number of optimizer steps on the head's weights."""
    call: Call | None
    """The entry of this call of the head in the model's history, if it has one."""
    key: int = 0
    """The key of the model's history, for calls of compiled heads."""


def origin(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    head: nn.Module | None = None,
    gathered: bool = False,
    call: Call | None = None,
    key: int = 0,
) -> Origin:
    """Return the present state of these tensors."""
    whole, weights = weights, tuple([_local(weight) for weight in weights])
    if gathered:  # FSDP2 frees what it gathered, and optimizers count the steps on its shards
        weights = tuple([weight for weight, part in zip(weights, whole, strict=True) if weight is not part])
    tensors, compiling = (*inputs, *weights), torch.compiler.is_compiling()
    return Origin(
        inputs,
        weights,
        None if compiling else head,
        gathered,
        tuple([_version(tensor) for tensor in tensors]),
        tuple([tensor.dtype for tensor in tensors]),
        None if compiling else tuple([tensor.data_ptr() for tensor in tensors]),
        tuple([_sample(weight).clone() for weight in weights]),
        0 if compiling or head is None else _heads[head][0],
        call,
        key,
    )


def change(origin: Origin, compare_elements: bool) -> str | None:
    """Return in words how the tensors have changed since, or None. Comparing elements synchronises with the device."""
    tensors, inputs = (*origin.inputs, *origin.weights), len(origin.inputs)
    for tensor, dtype in zip(tensors, origin.dtypes, strict=True):
        if tensor.dtype != dtype:
            return f"the weights were converted from {dtype} to {tensor.dtype}"
    if not origin.gathered and not all(tensor.untyped_storage().nbytes() or not tensor.numel() for tensor in tensors):
        return "the weights were sharded or offloaded"
    steps, name = (0, "") if origin.head is None else _heads.get(origin.head, (0, ""))
    if steps > origin.steps:
        return f"{name}.step() changed the weights"
    versions = tuple([_version(tensor) for tensor in tensors])
    if versions != origin.versions:
        what = "hidden states" if versions[:inputs] != origin.versions[:inputs] else "weights"
        return f"the {what} were written to in place"
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    if not origin.gathered and origin.addresses not in (None, addresses):
        return "the weights were moved or replaced (parameter.data = ..., model.to(...), merging an adapter)"
    samples = zip(origin.weights, origin.samples, strict=False)
    if compare_elements and not all(torch.allclose(_sample(now), old, 0, 0, equal_nan=True) for now, old in samples):
        return "the weights were written to through parameter.data (by hand, or by merging an adapter)"
    return None


def watch(head: nn.Module) -> None:
    """Count the steps of optimizers that hold a weight of this head."""
    if head not in _heads:
        _heads[head] = 0, ""
        if not _hook:
            hook: Any = torch.compiler.disable(_after_step)  # traced, it would lose its effect
            _hook.append(register_optimizer_step_post_hook(hook))


def unwatch(*heads: nn.Module) -> None:
    """Undo `watch`. Without any head or patched model left, remove the hook."""
    for head in heads:
        _heads.pop(head, None)
    if _hook and not _heads and not is_used():
        _hook.pop().remove()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count a step, also in the weights' version counters. PyTorch calls this after each step of each optimizer."""
    trained = {id(weight) for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad}
    for head, (steps, _) in list(_heads.items()):
        weights = [weight for weight in head.parameters() if id(weight) in trained]
        if weights:
            increment_version([_local(weight) for weight in weights])
            _heads[head] = steps + 1, type(optimizer).__name__
    note_step(optimizer)


def _local(weight: Any) -> Tensor:
    """Return what this process keeps of a weight: its shard in a DTensor, in DeepSpeed's ZeRO-3 or in FSDP1."""
    local: Tensor = getattr(weight, "_local_tensor", weight)
    if not torch.compiler.is_compiling():
        local = getattr(weight._base, "_local_shard", getattr(weight, "ds_tensor", local))
    return local


def _version(tensor: Tensor) -> int:
    """Return a tensor's version counter, which counts in-place writes; 0 in inference mode, which has no counter."""
    if torch.compiler.is_compiling():  # Dynamo cannot trace Tensor.is_inference
        return tensor._version
    return 0 if tensor.is_inference() else tensor._version


def _sample(weight: Tensor) -> Tensor:
    """Return a strided view of some hundred elements of a weight."""
    return weight.detach()[tuple([slice(None, None, max(size // 16, 1)) for size in weight.shape])]
