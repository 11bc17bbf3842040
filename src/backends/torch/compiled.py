"""torch.func transforms inside of torch.compile: the eager Functions, as they are, in the compiled graph.

Dynamo reads `requires_grad` of a transform's own argument as False, so that it would record a constant; before PyTorch
2.11 it cannot trace a torch.autograd.Function there; and what it traces differentiates twice without an error. Allowed
in the graph whole, the Functions run as in eager mode: in every call with backend "eager", and while AOT Autograd
traces with others. They are disabled too, since Dynamo would trace into them where an error has broken the graph.

Imported by the first call that needs it: `allow_in_graph` imports all of Dynamo.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.autograd import CrossEntropy, LinearCrossEntropy, asks_for_gradient
from xent.backends.torch.options import ARGUMENTS, reduction_of, stats_of
from xent.backends.torch.target_autograd import asks, with_target
from xent.backends.torch.transforms import refuse_transforms

__all__ = ["cross_entropy", "linear_cross_entropy"]

_NAMES = ("target", "weight", "sample_weight", "normalizer", "temperature", "support.ids", "support.offsets")


def _in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    allowed: Callable[..., Any] = torch.compiler.allow_in_graph(torch.compiler.disable(function))
    return allowed


@_in_graph
def cross_entropy(logits: Tensor, *options: Any) -> Any:
    """Return what `CrossEntropy` does."""
    _refuse({"logits": logits}, options)
    constant = (options[0].detach(), *options[1:])
    results = CrossEntropy.apply(logits, *asks_for_gradient(logits), *constant)
    return _with_target(results, 2, logits, *options)


@_in_graph
def linear_cross_entropy(*args: Any) -> Any:
    """Return what `LinearCrossEntropy` does; `needs` is found anew."""
    names = ("input", "linear_weight", "linear_bias")
    sources, _, linear, options = args[:3], args[3], args[4:7], args[7:]
    _refuse(dict(zip(names, sources, strict=True)), options)
    arguments, constant = (*sources, asks_for_gradient(*sources), *linear), (options[0].detach(), *options[1:])
    return _with_target(LinearCrossEntropy.apply(*arguments, *constant), 5, *arguments, *options)


def _with_target(results: Any, first: int, *args: Any) -> Any:
    """Return the results of a Function with the gradient of the target; statistics are from `first` on."""
    options = args[-ARGUMENTS:]
    if not asks(options[0]):
        return results
    made, names = list(results), stats_of(options)
    place = first + names.index("nll") if reduction_of(options) == "none" and "nll" in names else None
    made[0], nll = with_target(made[0], None if place is None else made[place], *args)
    if place is not None:
        made[place] = nll
    return tuple(made)


def _refuse(arguments: dict[str, Tensor | None], options: tuple[Any, ...]) -> None:
    named = {**arguments, **dict(zip(_NAMES, options, strict=False))}
    refuse_transforms({name: value for name, value in named.items() if isinstance(value, Tensor)})
