"""The recipe of deferred logits: the matrix products to sum, and what `xent.linear_cross_entropy` does to the sum."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.integrations.transformers.changes import Origin

__all__ = ["Caller", "Product", "Recipe", "autocast_dtype", "describe", "gather", "product", "run"]


@dataclass(frozen=True, eq=False)
class Product:
    """One term of the logits: scale * hidden @ weight.T."""

    hidden: Tensor
    """(..., D)"""
    weight: Tensor
    """(V, D), or a DTensor with the classes in shards"""
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Caller:
    """Calls a head whose weight is gathered only during its call: DeepSpeed's ZeRO-3, FSDP1, an FSDP2 group."""

    head: Any
    module: Any
    """The head, or what gathers its weight and calls it."""

    def __call__(self, hidden: Tensor, task: Callable[..., Tensor]) -> Tensor:
        """Return task(hidden, weight, bias), computed in the head's call."""
        self.head._xent_task = task
        try:
            made: Tensor = self.module(hidden)
        finally:
            del self.head._xent_task
        return made


@dataclass(frozen=True, eq=False)
class Recipe:
    """bound * tanh(scale * (sum of products + bias + offset)), without tanh if bound is None."""

    products: tuple[Product, ...]
    bias: Tensor | None
    tensors: tuple[Tensor, ...]
    """The hidden states, weights and constants from which the logits are computed."""
    origins: tuple[Origin, ...]
    """Their state when the head was called."""
    calls: tuple[tuple[int, int], ...]
    """The entries of the calls of heads in the model's history."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    autocast: torch.dtype | None
    """The dtype of matrix products under autocast, or None."""
    caller: Caller | None = None
    """If the weight is gathered only during the head's call: what calls the head, to compute with its weight."""
    made: tuple[Any, ...] | None = None
    """(function, args, kwargs) of the recorded call that made these logits; None if a head did."""
    is_view: bool = False
    """Whether they are a view of the logits in that call."""
    offset: Tensor | None = None
    """(V,) or (1, ..., 1, V): a constant that the model adds to its logits, such as final_logits_bias."""
    scale: float = 1.0
    bound: float | None = None
    steps: tuple[str, ...] = ()
    """The operations after the sum, in words."""
    gathered: bool = False
    """Whether logits in shards are gathered."""
    local: bool = False
    """Whether gathered logits are converted to a plain tensor."""
    hooks: tuple[Callable[[Tensor], Any], ...] = ()
    """Hooks of FSDP and DeepSpeed on the gradient of the logits, for the gradient of what is computed from them."""

    @property
    def in_shards(self) -> bool:
        """Whether the classes are in shards over the ranks of a mesh."""
        return hasattr(self.products[0].weight, "placements")

    def on_rows(self, change: Callable[[Tensor], Tensor]) -> "Recipe":
        """Return the recipe with `change` applied to the hidden states, to reshape or select rows."""
        return replace(self, products=tuple([replace(each, hidden=change(each.hidden)) for each in self.products]))

    def hooked(self, made: Tensor) -> Tensor:
        """Return the logits or the loss with the hooks."""
        for hook in self.hooks if made.requires_grad else ():
            made.register_hook(hook)
        return made


def run(recipe: Recipe, task: Callable[[tuple[Product, ...], Tensor | None], Tensor]) -> Tensor:
    """Return task(products, bias), under the autocast of the recipe and with gathered weights."""
    device = recipe.products[0].hidden.device.type
    same = autocast_dtype(device) == recipe.autocast
    with nullcontext() if same else torch.autocast(device, recipe.autocast, enabled=recipe.autocast is not None):
        if recipe.caller is None:
            return task(recipe.products, recipe.bias)
        return recipe.caller(
            recipe.products[0].hidden, lambda hidden, weight, bias: task((Product(hidden, weight),), bias)
        )


def product(recipe: Recipe) -> Tensor:
    """Compute the logits that a head returns, as the unpatched head does."""
    made = run(recipe, lambda products, bias: _linear(products[0].hidden, products[0].weight, bias))
    if recipe.gathered:
        made = gather(made)
    return made.to_local() if recipe.local else made  # type: ignore[attr-defined]


def _linear(hidden: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Return a product. If the weight is a DTensor, so is the product, as in PyTorch's ColwiseParallel."""
    if hasattr(weight, "placements"):
        from torch.distributed.tensor import DTensor, Replicate

        hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    return F.linear(hidden, weight, bias)


def gather(logits: Any) -> Tensor:
    """Return logits in shards as a replicated DTensor."""
    from torch.distributed.tensor import Replicate

    made: Tensor = logits.redistribute(placements=[Replicate()])
    return made


def describe(recipe: Recipe) -> str:
    """Return in words the operations that follow the product of hidden states and weight."""
    ranks = recipe.products[0].weight.device_mesh.size() if recipe.in_shards else 0  # type: ignore[attr-defined]
    said = {
        f"the classes stay in shards on {ranks} ranks": recipe.in_shards,
        f"{len(recipe.products) - 1} more product added (LoRA)": len(recipe.products) > 1,
        "the head's bias added": recipe.bias is not None,
        "a number for each class added": recipe.offset is not None,
    }
    return ", ".join([*[words for words, holds in said.items() if holds], *recipe.steps])


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast on a device type, or None if autocast is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
