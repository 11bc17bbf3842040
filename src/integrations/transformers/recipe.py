"""The recipe of deferred logits: the matrix products to sum, and the operations between head and loss.

`follow` executes a recipe: it computes the logits exactly as the unpatched model does. `sum_up` turns its operations
into the options of `xent.linear_cross_entropy` that give the same loss.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Caller", "Product", "Recipe", "Step", "autocast_dtype", "describe", "follow", "run", "sum_up"]


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
    """The head, or what wraps it."""

    def __call__(self, hidden: Tensor, task: Callable[..., Tensor]) -> Tensor:
        """Return task(hidden, weight, bias), computed in the head's call."""
        self.head._xent_task = task
        try:
            made: Tensor = self.module(hidden)
        finally:
            del self.head._xent_task
        return made


@dataclass(frozen=True)
class Step:
    """One operation on all logits: "mul" or "div" by a number, "tanh", or "to" a dtype.

    "gather" gathers a DTensor whose classes are in shards; "to_local" converts a DTensor to a plain tensor.
    """

    name: str
    value: Any = None


@dataclass(frozen=True, eq=False)
class Recipe:
    """(sum of products + bias) under autocast to `autocast` if that is not None, + offset, then the steps in order."""

    products: tuple[Product, ...]
    bias: Tensor | None
    steps: tuple[Step, ...]
    autocast: torch.dtype | None
    caller: "Caller | None"
    """If the weight is gathered only during the head's call: what calls the head, to compute with its weight."""
    offset: Tensor | None = None
    """(V,) or (1, ..., 1, V): a constant that the model adds to its logits, such as final_logits_bias."""
    hooks: tuple[Callable[[Tensor], Any], ...] = ()
    """Hooks of FSDP and DeepSpeed on the gradient of the logits, for the gradient of what is computed from them."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return hidden states and weights of all products, then bias and offset if they are not None."""
        parts = [part for product in self.products for part in (product.hidden, product.weight)]
        return (*parts, *[tensor for tensor in (self.bias, self.offset) if tensor is not None])

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> "Recipe":
        """Return the recipe with its `tensors()` replaced by these."""
        left = iter(tensors)
        products = tuple([Product(next(left), next(left), product.scale) for product in self.products])
        bias, offset = (None if tensor is None else next(left) for tensor in (self.bias, self.offset))
        return replace(self, products=products, bias=bias, offset=offset)

    @property
    def in_shards(self) -> bool:
        """Whether the classes are in shards over the ranks of a mesh."""
        return hasattr(self.products[0].weight, "placements")

    @property
    def is_dtensor(self) -> bool:
        """Whether executing the recipe gives a DTensor."""
        return self.in_shards and not any(step.name == "to_local" for step in self.steps)

    def on_rows(self, change: Callable[[Tensor], Tensor]) -> "Recipe":
        """Return the recipe with `change` applied to the hidden states, to reshape or select rows."""
        return replace(
            self, products=tuple([replace(product, hidden=change(product.hidden)) for product in self.products])
        )

    def on_classes(self, stop: int) -> "Recipe":
        """Return the recipe for the first `stop` classes."""
        products = tuple([replace(product, weight=product.weight[:stop]) for product in self.products])
        bias, offset = (None if tensor is None else tensor[..., :stop] for tensor in (self.bias, self.offset))
        return replace(self, products=products, bias=bias, offset=offset)

    def hooked(self, made: Tensor) -> Tensor:
        """Return the logits or the loss with the hooks."""
        for hook in self.hooks if made.requires_grad else ():
            made.register_hook(hook)
        return made

    def then(self, name: str, value: Any = None) -> "Recipe":
        """Return the recipe with one more step."""
        return replace(self, steps=(*self.steps, Step(name, value)))


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


def follow(recipe: Recipe) -> Tensor:
    """Compute the logits with the operations that the model called, in their order and dtypes."""

    def products(products: tuple[Product, ...], bias: Tensor | None) -> Tensor:
        first, *others = products
        logits = _linear(first.hidden, first.weight, bias)
        for other in others:
            logits = logits + F.linear(other.hidden, other.weight) * other.scale
        return logits

    logits = run(recipe, products)
    if recipe.offset is not None:
        logits = logits + recipe.offset
    for step in recipe.steps:
        if step.name == "mul":
            logits = logits * step.value
        elif step.name == "div":
            logits = logits / step.value
        elif step.name == "tanh":
            logits = torch.tanh(logits)
        elif step.name == "gather":
            logits = _gather(logits)
        elif step.name == "to_local":
            logits = _to_local(logits)
        else:
            logits = logits.to(step.value)
    return logits


def _linear(hidden: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Return a product. If the weight is a DTensor, so is the product, as in PyTorch's ColwiseParallel."""
    if not hasattr(weight, "placements"):
        return F.linear(hidden, weight, bias)
    from torch.distributed.tensor import DTensor, Replicate

    whole = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    return F.linear(whole, weight, bias)


def _gather(logits: Any) -> Tensor:
    from torch.distributed.tensor import Replicate

    made: Tensor = logits.redistribute(placements=[Replicate()])
    return made


def _to_local(logits: Any) -> Tensor:
    made: Tensor = logits.to_local()
    return made


def sum_up(steps: tuple[Step, ...]) -> tuple[float, float | None] | None:
    """Return the (logit_scale, softcap) that are equivalent to the steps, or None if there are none.

    Let s be the product of the factors before a tanh, and k that of the factors after it. Then k * tanh(s * z) equals
    k * tanh((k * s) * z / k): scale k * s and softcap k.
    """
    scale, bound = 1.0, None
    for step in steps:
        if step.name == "tanh":
            if bound is not None:
                return None
            bound = 1.0
        elif step.name in ("mul", "div"):
            factor = step.value if step.name == "mul" else 1 / step.value
            if bound is None:
                scale *= factor
            else:
                bound *= factor
    if bound is None:
        return scale, None
    return (scale * bound, bound) if bound > 0 else None


def describe(recipe: Recipe) -> str:
    """Return in words the operations that follow the product of hidden states and weight."""
    words = {"mul": "multiplied by {}", "div": "divided by {}", "tanh": "tanh", "to": "converted to {}"}
    said = [step for step in recipe.steps if step.name in words]
    mesh: Any = getattr(recipe.products[0].weight, "device_mesh", None)
    return ", ".join(
        [
            *([f"the classes stay in shards on {mesh.size()} ranks"] if recipe.in_shards else []),
            *([f"{len(recipe.products) - 1} more product added (LoRA)"] if len(recipe.products) > 1 else []),
            *(["the head's bias added"] if recipe.bias is not None else []),
            *(["a number for each class added"] if recipe.offset is not None else []),
            *[words[step.name].format(step.value) for step in said],
        ]
    )


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast on a device type, or None if autocast is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
