"""Whether what deferred logits are made from is still what it was when the head was called.

Logits that are computed late must not be those of other weights. Most writes raise a tensor's version counter. Fused
optimizers, `parameter.data` and whoever writes by address do not; for those an `Origin` keeps the number of optimizer
steps so far, the address of each tensor, and a few elements of each weight. None of it synchronises with the device
until somebody looks at the logits.
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
"""About how many rows and columns of a weight are compared."""

_clocks: dict[torch.device, Tensor] = {}
"""A tensor on each device whose version counter every optimizer step raises: torch.compile's graphs can read that."""

_steps: "weakref.WeakKeyDictionary[Optimizer, dict[torch.device, int]]" = weakref.WeakKeyDictionary()
"""Optimizer -> what the clocks showed after its last step."""


@dataclass(frozen=True, eq=False)
class Origin:
    """Tensors that logits are made from, and what was known of them when the head was called."""

    inputs: tuple[Tensor, ...]
    """Hidden states and others that no optimizer holds."""
    weights: tuple[Tensor, ...]
    head: nn.Module | None
    """The head, where FSDP2 takes its weights away and brings them back."""
    versions: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    addresses: tuple[int, ...] | None
    """None where torch.compile made the logits."""
    samples: tuple[Tensor, ...]
    """Some elements of each weight."""
    device: torch.device
    time: int | None
    """What the clock of that device showed; None where there was none yet, inside of torch.compile."""
    call: Call | None
    """The head's call, where somebody wants to know what becomes of it."""


def origin(
    inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], head: nn.Module | None = None, call: Call | None = None
) -> Origin:
    """Return what is known of these tensors now."""
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
    """Return what happened since to the tensors, in words, or None. Comparing elements waits for the device."""
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
    """Return the class of an optimizer that has changed a weight since."""
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
    """Advance the clocks; PyTorch calls this after every step of every optimizer."""
    for clock in _clocks.values():
        torch.autograd.graph.increment_version(clock)
    if _clocks:
        _steps[optimizer] = {device: clock._version for device, clock in _clocks.items()}


_hook: Any = torch.compiler.disable(_note_step)  # or torch.compile would trace it and leave it out
register_optimizer_step_post_hook(_hook)


def start_clock(device: torch.device) -> Tensor:
    """Return the clock of a device, which starts now if there is none."""
    if device not in _clocks:
        with torch.inference_mode(False):  # whose tensors have no version counter
            _clocks[device] = torch.empty(0, device=device)
    return _clocks[device]


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; other tensors as they are."""
    return getattr(tensor, "_local_tensor", tensor)


def _version(tensor: Tensor) -> int:
    """Return how often a tensor has been written to; tensors of inference mode do not count that."""
    if torch.compiler.is_compiling():  # which knows no Tensor.is_inference
        return tensor._version
    return 0 if tensor.is_inference() else tensor._version


def _sample(weight: Tensor) -> Tensor:
    """Return a view of some elements, spread over rows and columns."""
    counts = ([1] * weight.ndim + [*_SAMPLES])[-weight.ndim :]
    steps = [max(size // count, 1) for size, count in zip(weight.shape, counts, strict=True)]
    sizes = [-(-size // step) for size, step in zip(weight.shape, steps, strict=True)]
    strides = [stride * step for stride, step in zip(weight.stride(), steps, strict=True)]
    return weight.detach().as_strided(sizes, strides)


def _same(now: Tensor, before: Tensor) -> bool:
    """Whether the elements are the same bits: NaN is NaN."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[before.element_size()]
    return torch.equal(now.contiguous().view(whole), before.view(whole))
