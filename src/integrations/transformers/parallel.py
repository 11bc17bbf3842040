"""Heads with their classes in shards over the ranks of a mesh: PyTorch's ColwiseParallel, and transformers' plans.

The weight of such a head is a DTensor. PyTorch gives the head hooks: one makes DTensors of hidden states, one
redistributes the logits. They stay, and deferred logits record what the second one does. transformers replaces the
head's forward by one that does the same. That forward is taken off the head, and called where logits are computed.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.integrations.transformers.deferred import LAYOUT, defer, is_open, metadata, real
from xent.integrations.transformers.recipe import Recipe

__all__ = [
    "compute",
    "gathered",
    "give_back",
    "in_shards",
    "is_of_plan",
    "is_of_tensor_parallelism",
    "is_running",
    "take_over",
    "whole",
    "why_computed",
]


@dataclass
class _Kept:
    """What transformers put in the place of a head's forward."""

    forward: Any
    why: str | None
    """Why its logits cannot be deferred, or None."""
    running: bool = False


def in_shards(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "placements")


def is_of_plan(forward: Any) -> bool:
    """Whether a forward is one that transformers' tensor parallelism puts in the place of a module's own."""
    module, name = getattr(forward, "__module__", None), getattr(forward, "__qualname__", "")
    return str(module).startswith("transformers.") and name.endswith("install_forward.<locals>.tp_forward")


def is_of_tensor_parallelism(hook: Any) -> bool:
    """Whether a forward hook is one of PyTorch's ParallelStyle."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor.")


def take_over(head: Any) -> None:
    """Take transformers' forward off a head, so that the one of its class is called."""
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
    if gathers or name == "TensorParallelLayer":  # which changes nothing
        why = None
    del head.forward
    head._xent_kept = _Kept(forward, why)


def give_back(head: Any) -> None:
    """Undo `take_over`."""
    kept: _Kept | None = vars(head).pop("_xent_kept", None)
    if kept is not None:
        head.forward = kept.forward


def gathered(head: Any) -> bool:
    """Whether transformers' forward makes a plain tensor of logits that are in shards."""
    return getattr(head, "_xent_kept", None) is not None and in_shards(head.weight)


def is_running(head: Any) -> bool:
    """Whether transformers' forward calls the head now, to compute logits."""
    kept: _Kept | None = getattr(head, "_xent_kept", None)
    return kept is not None and kept.running


def compute(head: Any, input: Tensor) -> Tensor:
    """Return the logits that the head makes where it is not patched."""
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
    """Return why the logits of a head cannot be deferred for the way in which it is parallelised, or None."""
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
    """Return hidden states, the same on every rank, as a plain tensor whose gradient is the sum over ranks."""
    made: Tensor = input.to_local(grad_placements=input.placements) if in_shards(input) else input
    return made


def _is_replicated(*placements: Any) -> bool:
    return all(placement is not None and placement.is_replicate() for placement in placements)


def _placements(logits: Any) -> Any:
    """Return the placements that the DTensor would have."""
    from torch.distributed.tensor import Replicate, Shard

    shown = Replicate() if _has(logits._recipe, "gather") else Shard(metadata(logits, "ndim") - 1)
    return (shown,)


def _device_mesh(logits: Any) -> Any:
    return logits._recipe.products[0].weight.device_mesh


def _redistribute(logits: Any) -> Any:
    def redistribute(device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> Any:
        """Record that shards are gathered, or that nothing changes."""
        recipe = logits._recipe
        same = device_mesh is None or device_mesh == _device_mesh(logits)
        if is_open(logits) and same and not set(kwargs) - {"async_op"} and placements and len(placements) == 1:
            if placements[0].is_replicate():
                return _then(logits, recipe if _has(recipe, "gather") else recipe.then("gather"))
            if not _has(recipe, "gather") and any(placements[0].is_shard(axis) for axis in (-1, logits.ndim - 1)):
                return _then(logits, recipe)
        values: Any = real(logits, redistribute)
        return values.redistribute(device_mesh, placements, **kwargs)

    return redistribute


def _to_local(logits: Any) -> Any:
    def to_local(**kwargs: Any) -> Any:
        """Record that gathered logits become a plain tensor; a shard of them is computed."""
        if is_open(logits) and not kwargs and _has(logits._recipe, "gather"):
            return _then(logits, logits._recipe.then("to_local"))
        values: Any = real(logits, to_local)
        return values.to_local(**kwargs)

    return to_local


def _full_tensor(logits: Any) -> Any:
    def full_tensor(**kwargs: Any) -> Any:
        """Record that shards are gathered into a plain tensor."""
        from torch.distributed.tensor import Replicate

        if is_open(logits) and not kwargs:
            return _redistribute(logits)(placements=[Replicate()]).to_local()
        values: Any = real(logits, full_tensor)
        return values.full_tensor(**kwargs)

    return full_tensor


def _has(recipe: Recipe, name: str) -> bool:
    return any(step.name == name for step in recipe.steps)


def _then(logits: Any, recipe: Recipe) -> Any:
    return defer(recipe, tuple(logits.shape), logits.dtype, logits._origins)


LAYOUT.update(
    placements=_placements,
    device_mesh=_device_mesh,
    redistribute=_redistribute,
    to_local=_to_local,
    full_tensor=_full_tensor,
)
