"""Tensor-parallel heads, whose classes are in shards: PyTorch's ColwiseParallel, and transformers' plans.

The weight of such a head is a DTensor. PyTorch adds two hooks to the head: one converts hidden states to DTensors, one
redistributes the logits. The hooks stay, and deferred logits record the redistribution. transformers instead replaces
the head's forward by one that does both. `patch` removes that forward and calls it only if logits are computed.
"""

import inspect
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.integrations.transformers.deferred import LAYOUT, derive, is_open, metadata, real
from xent.integrations.transformers.recipe import gather

__all__ = [
    "compute",
    "gathered",
    "give_back",
    "in_shards",
    "is_of_plan",
    "is_running",
    "take_over",
    "whole",
    "why_computed",
]


@dataclass
class _Kept:
    """The forward that transformers gave to a head."""

    forward: Any
    why: str | None
    """Why the logits of this forward cannot be deferred, or None."""
    running: bool = False


def in_shards(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "placements")


def is_of_plan(forward: Any) -> bool:
    """Whether a forward was installed by transformers' tensor parallelism."""
    module, name = getattr(forward, "__module__", None), getattr(forward, "__qualname__", "")
    return str(module).startswith("transformers.") and name.endswith("install_forward.<locals>.tp_forward")


def take_over(head: Any) -> None:
    """Remove transformers' forward from a head, so that the forward of its class is called."""
    forward = vars(head).get("forward")
    if not is_of_plan(forward):
        return
    style = inspect.getclosurevars(forward).nonlocals.get("self")
    name = type(style).__name__
    gathers = (
        name == "ColwiseParallel"
        and _is_replicated(getattr(style, "input_layouts", None))
        and _is_replicated(getattr(style, "output_layouts", None))
        and getattr(style, "use_local_output", False)
    )
    why: str | None = (
        f"its tensor-parallel plan gives the head transformers' {name}, and logits are deferred for "
        '"colwise_gather_output" and "replicate"'
    )
    if gathers or name == "TensorParallelLayer":  # the base class, which changes nothing
        why = None
    del head.forward
    head._xent_kept = _Kept(forward, why)


def give_back(head: Any) -> None:
    """Undo `take_over`."""
    kept: _Kept | None = vars(head).pop("_xent_kept", None)
    if kept is not None:
        head.forward = kept.forward


def gathered(head: Any) -> bool:
    """Whether transformers' forward gathers logits in shards into a plain tensor."""
    return getattr(head, "_xent_kept", None) is not None and in_shards(head.weight)


def is_running(head: Any) -> bool:
    """Whether the head is being called by transformers' forward, to compute logits."""
    kept: _Kept | None = getattr(head, "_xent_kept", None)
    return kept is not None and kept.running


def compute(head: Any, input: Tensor) -> Tensor:
    """Return the logits of the unpatched head."""
    kept: _Kept | None = getattr(head, "_xent_kept", None)
    if kept is None or kept.running:
        return F.linear(input, head.weight, head.bias)
    kept.running = True
    try:
        made: Tensor = kept.forward(input)
    finally:
        kept.running = False
    return made


def why_computed(head: Any, input: Any) -> str | None:
    """Return why the head's tensor parallelism does not allow deferred logits, or None."""
    kept: _Kept | None = getattr(head, "_xent_kept", None)
    if kept is not None and kept.why is not None:
        return kept.why
    if not in_shards(head.weight):
        return None
    if torch.compiler.is_compiling():
        return "torch.compile defers no logits with classes in shards"
    weight, bias = head.weight, head.bias
    mesh, placements = weight.device_mesh, tuple(weight.placements)
    if mesh.ndim > 1 or not placements[0].is_shard(0):
        return f"the head's weight has placements {placements}, and they must be (Shard(dim=0),) when it is called"
    if bias is not None and tuple(getattr(bias, "placements", ())) != placements:
        return "the head's bias has other placements than its weight"
    if in_shards(input) and (input.device_mesh != mesh or not _is_replicated(*input.placements)):
        return f"the head's hidden states have placements {input.placements} on {input.device_mesh}"
    return None


def whole(input: Any) -> Tensor:
    """Return replicated hidden states as a plain tensor, whose gradient is summed over ranks."""
    made: Tensor = input.to_local(grad_placements=input.placements) if in_shards(input) else input
    return made


def _is_replicated(*placements: Any) -> bool:
    return all(placement is not None and placement.is_replicate() for placement in placements)


def _placements(logits: Any) -> Any:
    """Return the placements of the DTensor that the unpatched head would return."""
    from torch.distributed.tensor import Replicate, Shard

    return (Replicate() if logits._recipe.gathered else Shard(metadata(logits, "ndim") - 1),)


def _device_mesh(logits: Any) -> Any:
    return logits._recipe.products[0].weight.device_mesh


def _redistribute(logits: Any) -> Any:
    def redistribute(device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> Any:
        """Record a gather of the shards, or nothing if the placements stay the same."""
        recipe = logits._recipe
        same = device_mesh is None or device_mesh == _device_mesh(logits)
        if is_open(logits) and same and not set(kwargs) - {"async_op"} and placements and len(placements) == 1:
            if placements[0].is_replicate() and not recipe.gathered:
                return derive(logits, replace(recipe, gathered=True), (gather, (logits,), {}))
            kept = recipe.gathered == placements[0].is_replicate()
            if kept and (recipe.gathered or any(placements[0].is_shard(axis) for axis in (-1, logits.ndim - 1))):
                return logits
        return real(logits, redistribute).redistribute(device_mesh, placements, **kwargs)  # type: ignore[attr-defined]

    return redistribute


def _to_local(logits: Any) -> Any:
    def to_local(**kwargs: Any) -> Any:
        """Record the conversion of gathered logits to a plain tensor; for logits in shards compute them."""
        if is_open(logits) and not kwargs and logits._recipe.gathered:
            return derive(logits, replace(logits._recipe, local=True), (methodcaller("to_local"), (logits,), {}))
        return real(logits, to_local).to_local(**kwargs)  # type: ignore[attr-defined]

    return to_local


def _full_tensor(logits: Any) -> Any:
    def full_tensor(**kwargs: Any) -> Any:
        """Record a gather of the shards into a plain tensor."""
        from torch.distributed.tensor import Replicate

        if is_open(logits) and not kwargs:
            return _redistribute(logits)(placements=[Replicate()]).to_local()
        return real(logits, full_tensor).full_tensor(**kwargs)  # type: ignore[attr-defined]

    return full_tensor


LAYOUT.update(
    placements=_placements,
    device_mesh=_device_mesh,
    redistribute=_redistribute,
    to_local=_to_local,
    full_tensor=_full_tensor,
)
