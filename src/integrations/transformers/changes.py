"""Detect whether hidden states or weights have changed since the head was called.

Deferred logits that are computed later must not use changed weights. Most writes increment a tensor's version counter.
Fused optimizers, `parameter.data` and writes by address do not. For those, an `Origin` stores the number of optimizer
steps, the address of each tensor, and a few elements of each weight. Elements are compared only when the logits are
read, because that synchronises with the device.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from xent.integrations.transformers.history import Call

__all__ = ["Origin", "change", "origin", "start_clock"]

_SAMPLES = 32, 16
"""The approximate numbers of rows and columns of a weight that are compared."""

_clocks: dict[torch.device, Tensor] = {}
"""One tensor per device. Every optimizer step increments its version counter, which compiled graphs can read."""

_steps: "weakref.WeakKeyDictionary[Optimizer, dict[torch.device, int]]" = weakref.WeakKeyDictionary()
"""Optimizer -> version counter of each device's clock after its last step."""


@dataclass(frozen=True, eq=False)
class Origin:
    """The tensors from which logits are computed, and their state when the head was called."""

    inputs: tuple[Tensor, ...]
    """Hidden states, and other tensors that are no parameters."""
    weights: tuple[Tensor, ...]
    head: nn.Module | None
    """The head, if FSDP2 shards it in its own group; its weights are gathered only during its calls."""
    versions: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    addresses: tuple[int, ...] | None
    """None if a compiled graph created the logits."""
    samples: tuple[Tensor, ...]
    """Some elements of each weight."""
    device: torch.device
    time: int | None
    """The version counter of that device's clock; None if torch.compile traced before the clock existed."""
    call: Call | None
    """The entry of this call of the head in the model's history, if it has one."""


def origin(
    inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], head: nn.Module | None = None, call: Call | None = None
) -> Origin:
    """Return the present state of these tensors."""
    tensors = (*inputs, *weights)
    compiling, device = torch.compiler.is_compiling(), tensors[0].device
    clock = _clocks.get(device) if compiling else start_clock(device)
    return Origin(
        inputs,
        weights,
        head,
        tuple([_version(_local(tensor)) for tensor in tensors]),
        tuple([tensor.dtype for tensor in tensors]),
        None if compiling else tuple([_local(tensor).data_ptr() for tensor in tensors]),
        () if head is not None else tuple([_sample(_local(weight)).clone() for weight in weights]),
        device,
        None if clock is None else clock._version,
        call,
    )


def change(origin: Origin, compare_elements: bool) -> str | None:
    """Return in words how the tensors have changed since, or None. Comparing elements synchronises with the device."""
    tensors = tuple([_local(tensor) for tensor in (*origin.inputs, *origin.weights)])
    for tensor, dtype in zip(tensors, origin.dtypes, strict=True):
        if tensor.dtype != dtype:
            return f"the weights were converted from {dtype} to {tensor.dtype}"
    if origin.head is None and not all(tensor.untyped_storage().nbytes() or not tensor.numel() for tensor in tensors):
        return "the weights were sharded or offloaded"
    stepped = _stepped_since(origin)
    if stepped is not None:
        return f"{stepped}.step() changed the weights"
    versions = tuple([_version(tensor) for tensor in tensors])
    if versions != origin.versions:
        inputs = len(origin.inputs)
        what = "hidden states" if versions[:inputs] != origin.versions[:inputs] else "weights"
        return f"the {what} were written to in place"
    if origin.head is None and origin.addresses not in (None, tuple([tensor.data_ptr() for tensor in tensors])):
        return "the weights were moved or replaced (parameter.data = ..., model.to(...), merging an adapter)"
    if compare_elements and not all(
        _same(_sample(_local(weight)), sample) for weight, sample in zip(origin.weights, origin.samples, strict=False)
    ):
        return "the weights were written to through parameter.data (by hand, or by merging an adapter)"
    return None


def _stepped_since(origin: Origin) -> str | None:
    """Return the class name of an optimizer that has stepped on a weight since, or None."""
    device, time = origin.device, origin.time
    if time is None or _clocks[device]._version == time:
        return None
    held = [*origin.weights, *(() if origin.head is None else origin.head.parameters())]
    ids = {id(tensor) for tensor in held if tensor.requires_grad}
    for optimizer, times in list(_steps.items()):
        if times.get(device, 0) > time:
            for group in optimizer.param_groups:
                if not ids.isdisjoint([id(tensor) for tensor in group["params"]]):
                    return type(optimizer).__name__
    return None


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Advance the clocks. PyTorch calls this after each step of each optimizer."""
    for clock in _clocks.values():
        torch.autograd.graph.increment_version(clock)
    if _clocks:
        _steps[optimizer] = {device: clock._version for device, clock in _clocks.items()}


_hook: Any = torch.compiler.disable(_note_step)  # otherwise torch.compile would trace the hook and drop its effect
register_optimizer_step_post_hook(_hook)


def start_clock(device: torch.device) -> Tensor:
    """Return the clock of a device. Create it if there is none."""
    if device not in _clocks:
        with torch.inference_mode(False):  # tensors of inference mode have no version counter
            _clocks[device] = torch.empty(0, device=device)
    return _clocks[device]


def _local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor; other tensors unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def _version(tensor: Tensor) -> int:
    """Return a tensor's version counter, which counts in-place writes; 0 in inference mode, which has no counter."""
    if torch.compiler.is_compiling():  # Dynamo cannot trace Tensor.is_inference
        return tensor._version
    return 0 if tensor.is_inference() else tensor._version


def _sample(weight: Tensor) -> Tensor:
    """Return a strided view of about 32 x 16 elements of a weight."""
    counts = ([1] * weight.ndim + [*_SAMPLES])[-weight.ndim :]
    steps = [max(size // count, 1) for size, count in zip(weight.shape, counts, strict=True)]
    sizes = [-(-size // step) for size, step in zip(weight.shape, steps, strict=True)]
    strides = [stride * step for stride, step in zip(weight.stride(), steps, strict=True)]
    return weight.detach().as_strided(sizes, strides)


def _same(now: Tensor, before: Tensor) -> bool:
    """Whether the elements have the same bits; NaN equals NaN."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[before.element_size()]
    return torch.equal(now.contiguous().view(whole), before.view(whole))
