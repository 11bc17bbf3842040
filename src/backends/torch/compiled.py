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

from xent.backends.torch import scale_gradient
from xent.backends.torch.autograd import CrossEntropy, LinearCrossEntropy, asks_for_gradient
from xent.backends.torch.transforms import refuse_gradients, refuse_transforms

__all__ = ["cross_entropy", "linear_cross_entropy"]

_NAMES = ("target", "weight", "sample_weight", "normalizer", "temperature", "support.ids", "support.offsets", "logit_scale", "softcap")
_SCALE = _NAMES.index("logit_scale")


def _in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    allowed: Callable[..., Any] = torch.compiler.allow_in_graph(torch.compiler.disable(function))
    return allowed


@_in_graph
def cross_entropy(logits: Tensor, *options: Any) -> Any:
    """Return what `CrossEntropy` does."""
    _refuse({"logits": logits}, options)
    logits, scale = scale_gradient.of_logits(logits, options[_SCALE])
    return CrossEntropy.apply(logits, *asks_for_gradient(logits), *_with_scale(options, scale))


@_in_graph
def linear_cross_entropy(*args: Any) -> Any:
    """Return what `LinearCrossEntropy` does; `needs` is found anew."""
    names = ("input", "linear_weight", "linear_bias")
    sources, _, linear, options = args[:3], args[3], args[4:7], args[7:]
    _refuse(dict(zip(names, sources, strict=True)), options)
    *sources, scale = scale_gradient.of_linear(*sources, options[_SCALE])
    return LinearCrossEntropy.apply(*sources, asks_for_gradient(*sources), *linear, *_with_scale(options, scale))


def _refuse(arguments: dict[str, Tensor | None], options: tuple[Any, ...]) -> None:
    given = {name: value for name, value in zip(_NAMES, options, strict=False) if isinstance(value, Tensor)}
    refuse_gradients({name: value for name, value in given.items() if name != "logit_scale"})
    refuse_transforms(given | {name: value for name, value in arguments.items() if value is not None})


def _with_scale(options: tuple[Any, ...], scale: Tensor | None) -> tuple[Any, ...]:
    return *options[:_SCALE], scale, *options[_SCALE + 1 :]
