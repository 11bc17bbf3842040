"""Autograd kernels of the custom operations, which decide at run time what is differentiated.

They are needed for exported programs and for `compiled`. An exported program contains only the operations: tracing
drops each torch.autograd.Function around them, and `requires_grad` of the example inputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import ops as _ops  # noqa: F401  registers the operations
from xent.backends.torch import private, scale_gradient
from xent.backends.torch.autograd import CrossEntropy, LinearCrossEntropy, asks_for_gradient
from xent.backends.torch.options import ARGUMENTS, reduction_of, stats_of
from xent.backends.torch.target_autograd import asks, with_target
from xent.backends.torch.transforms import refuse_gradients, refuse_transforms

__all__ = ["cross_entropy", "linear_cross_entropy"]

_NAMES = (
    "target",
    "weight",
    "sample_weight",
    "normalizer",
    "temperature",
    "support.ids",
    "support.offsets",
    "logit_scale",
    "softcap",
)
_SCALE = _NAMES.index("logit_scale")


def cross_entropy(logits: Tensor, *options: Any) -> Any:
    """Apply `CrossEntropy`."""
    _refuse({"logits": logits}, options)
    logits, scale = scale_gradient.of_logits(logits, options[_SCALE])
    options = _with_scale(options, scale)
    results = CrossEntropy.apply(logits, *asks_for_gradient(logits), *_constant_target(options))
    return _with_target(results, 2, logits, *options)


def linear_cross_entropy(*args: Any) -> Any:
    """Apply `LinearCrossEntropy`, with `needs` read from the arguments."""
    names = ("input", "linear_weight", "linear_bias")
    source, weight, bias, _, *linear = args[:7]
    options = args[7:]
    _refuse(dict(zip(names, args, strict=False)), options)
    *sources, scale = scale_gradient.of_linear(source, weight, bias, options[_SCALE])
    options, arguments = _with_scale(options, scale), (*sources, asks_for_gradient(*sources), *linear)
    return _with_target(LinearCrossEntropy.apply(*arguments, *_constant_target(options)), 5, *arguments, *options)


def _refuse(arguments: dict[str, Tensor | None], options: tuple[Any, ...]) -> None:
    given = {name: value for name, value in zip(_NAMES, options, strict=False) if isinstance(value, Tensor)}
    refuse_gradients({name: value for name, value in given.items() if name not in ("target", "logit_scale")})
    refuse_transforms(given | {name: value for name, value in arguments.items() if value is not None})


def _constant_target(options: tuple[Any, ...]) -> tuple[Any, ...]:
    return options[0].detach(), *options[1:]


def _with_target(results: Any, first: int, *args: Any) -> Any:
    """Return the results of a Function with the gradient of the target added; statistics start at `first`."""
    options = args[-ARGUMENTS:]
    if not asks(options[0]):
        return results
    made, names = list(results), stats_of(options)
    place = first + names.index("nll") if reduction_of(options) == "none" and "nll" in names else None
    made[0], nll = with_target(made[0], None if place is None else made[place], *args)
    if place is not None:
        made[place] = nll
    return tuple(made)


def _with_scale(options: tuple[Any, ...], scale: Tensor | None) -> tuple[Any, ...]:
    return *options[:_SCALE], scale, *options[_SCALE + 1 :]


def _logits_results(logits: Tensor, _: bool, *options: Any) -> Any:
    loss, kept, *stats = cross_entropy(logits, *options)
    return loss, kept, stats


def _linear_results(*args: Any) -> Any:
    loss, deferred, *rest = linear_cross_entropy(*args)
    return loss, deferred, rest[:3], rest[3:]


def _under_autograd(operation: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        if any(asks_for_gradient(*(value for value in args if isinstance(value, Tensor)))):
            return function(*args)
        with private.below_autograd():
            return operation(*args)

    return kernel


_LIBRARY = torch.library.Library("xent", "IMPL")
if private.below_autograd is not None:
    for _name, _function in (("cross_entropy", _logits_results), ("linear_cross_entropy", _linear_results)):
        _LIBRARY.impl(_name, _under_autograd(getattr(torch.ops.xent, _name).default, _function), "Autograd")
