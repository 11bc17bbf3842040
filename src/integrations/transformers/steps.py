"""The calls that deferred logits record in their recipe; others compute real logits. Importing this registers them.

A recorder gets the called function and its arguments. It returns deferred logits, or NotImplemented if it cannot record
the call.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xent.integrations.transformers import loss
from xent.integrations.transformers.attributes import getter
from xent.integrations.transformers.changes import origin
from xent.integrations.transformers.deferred import KNOWN, DeferredLogits, derive, is_open
from xent.integrations.transformers.recipe import Recipe
from xent.integrations.transformers.replaced import inner

__all__: list[str] = []


def _cross_entropy(function: Any, *args: Any, **kwargs: Any) -> Any:
    return loss.cross_entropy(*args, **kwargs)


def _multiply(function: Any, logits: Any, factor: Any) -> Any:
    return _scaled(function, (logits, factor), *((logits, factor) if is_open(logits) else (factor, logits)))


def _divide(function: Any, logits: Any, divisor: Any) -> Any:
    return _scaled(function, (logits, divisor), logits, divisor, "divided")


def _scaled(function: Any, args: Any, logits: Any, factor: Any, done: str = "multiplied") -> Any:
    """Record a multiplication or division by a number. After tanh it must stay a softcap, which is positive."""
    if not is_open(logits) or type(factor) not in (int, float) or not math.isfinite(factor) or factor == 0:
        return NotImplemented
    recipe, times = logits._recipe, 1 / factor if done == "divided" else factor
    if recipe.bound is None:
        change = {"scale": recipe.scale * times}
    elif times > 0:
        change = {"bound": recipe.bound * times}
    else:
        return NotImplemented
    recipe = replace(recipe, layout="contiguous", steps=(*recipe.steps, f"{done} by {factor}"), **change)
    return derive(logits, recipe, (function, args, {}))


def _tanh(function: Any, logits: Any) -> Any:
    """Record a tanh, which is part of a softcap."""
    if not is_open(logits) or logits._recipe.bound is not None:
        return NotImplemented
    recipe = replace(logits._recipe, bound=1.0, layout="contiguous", steps=(*logits._recipe.steps, "tanh"))
    return derive(logits, recipe, (function, (logits,), {}))


def _add(function: Any, logits: Any, other: Any) -> Any:
    """Record the sum of two heads (LoRA), or of logits and one constant per class (final_logits_bias)."""
    args = logits, other
    if not is_open(logits):
        logits, other = other, logits
    if not is_open(logits) or not isinstance(other, Tensor) or logits._recipe.steps:
        return NotImplemented
    recipe, classes = replace(logits._recipe, layout="contiguous"), logits.shape[-1]
    if recipe.offset is not None or recipe.in_shards:
        return NotImplemented
    if isinstance(other, DeferredLogits):
        if not is_open(other):
            return NotImplemented
        theirs, alike = other._recipe, logits.shape == other.shape and logits.dtype == other.dtype
        parts = theirs.bias, theirs.offset, theirs.bound, theirs.caller, recipe.caller
        simple = all(part is None for part in parts)
        if not alike or not simple or theirs.in_shards or theirs.autocast != recipe.autocast:
            return NotImplemented
        added = [replace(each, scale=each.scale * theirs.scale) for each in theirs.products]
        recipe = replace(recipe, products=(*recipe.products, *added))
        return derive(logits, recipe, (function, args, {}), other._tensors, other._origins)
    fits = other.ndim <= logits.ndim and other.shape[-1:] == (classes,) and other.numel() == classes
    kinds = (logits.dtype, torch.float32 if recipe.autocast is not None else logits.dtype)
    if not fits or type(other) not in (Tensor, Parameter) or other.device != logits.device or other.dtype not in kinds:
        return NotImplemented
    recipe = replace(recipe, offset=other, dtype=torch.promote_types(logits.dtype, other.dtype))
    return derive(logits, recipe, (function, args, {}), (other,), (origin((), (other,)),))


def _to(function: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a conversion to a dtype that can represent every value, on the device of the logits."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    for argument in args:
        if isinstance(argument, torch.dtype):
            dtype = argument
        elif isinstance(argument, (str, torch.device)):
            device = argument
        else:
            return NotImplemented
    if function is Tensor.float:
        dtype = torch.float32
    if not is_open(logits) or (device is not None and torch.device(device) != logits.device):
        return NotImplemented
    if dtype in (None, logits.dtype):
        return logits
    if torch.promote_types(dtype, logits.dtype) != dtype:
        return NotImplemented
    steps = (*logits._recipe.steps, f"converted to {dtype}")
    recipe = replace(logits._recipe, dtype=dtype, layout="contiguous", steps=steps)
    return derive(logits, recipe, (function, (logits, *args), kwargs))


def _copy(function: Any, logits: Any) -> Any:
    """Record a copy. `contiguous` makes none of contiguous logits."""
    if not is_open(logits):
        return NotImplemented
    if function is Tensor.contiguous and logits._recipe.layout == "contiguous":
        return logits
    return derive(logits, replace(logits._recipe, layout="contiguous"), (function, (logits,), {}))


def _detach(function: Any, logits: Any) -> Any:
    """Record what DeepSpeed's ZeRO-3 does in a Function of its own to all outputs of a model."""
    if not is_open(logits) or logits._recipe.caller is None or torch.is_grad_enabled():
        return NotImplemented
    with torch.enable_grad():
        return derive(logits, logits._recipe, (_same, (logits,), {}))


def _same(values: Tensor) -> Tensor:
    return values


def _reshape(function: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a reshape of the leading axes. Tensor.view is recorded only if the strides would allow a view."""
    if not is_open(logits) or (function is Tensor.view and logits._recipe.layout == "other"):
        return NotImplemented
    recipe, is_view, shaped = logits._recipe, logits._recipe.layout != "other", args
    if function not in (Tensor.flatten, torch.flatten):
        size = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        if not size or size[-1] not in (recipe.classes, -1):
            return NotImplemented
        shaped = ((*size[:-1], 1),)
    try:  # with one class in place of all of them
        shape = function(torch.empty((*logits.shape[:-1], 1), device="meta"), *shaped, **kwargs).shape
    except RuntimeError:
        return NotImplemented
    if shape[-1:] != (1,):
        return NotImplemented
    layout = recipe.layout if is_view else "contiguous"
    recipe = recipe.on_rows(lambda hidden: hidden.reshape(*shape[:-1], hidden.shape[-1]), layout=layout)
    return derive(logits, recipe, (function, (logits, *args), kwargs), is_view=is_view)


def _take(function: Any, logits: Any, index: Any) -> Any:
    """Record an index: slices of rows and of the first classes, or one boolean mask of rows."""
    if not is_open(logits):
        return NotImplemented
    recipe: Recipe = logits._recipe
    made: tuple[Any, ...] = (function, (logits, index), {})
    if isinstance(index, Tensor) and not isinstance(index, DeferredLogits):
        if index.dtype != torch.bool or index.ndim >= logits.ndim:
            return NotImplemented
        index = index.clone()  # the caller may change the mask before the logits are read
        made = function, (logits, index), {}
        return derive(logits, recipe.on_rows(lambda hidden: hidden[index], layout="contiguous"), made)
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is Ellipsis or isinstance(part, slice) or type(part) is int for part in parts):
        return NotImplemented
    places = [place for place, part in enumerate(parts) if part is Ellipsis] or [len(parts)]
    missing = logits.ndim - len([part for part in parts if part is not Ellipsis])
    if len(places) > 1 or missing < 0:
        return NotImplemented
    parts = [*parts[: places[0]], *[slice(None)] * missing, *parts[places[0] + 1 :]]
    rows, chosen = parts[:-1], parts[-1]
    if not isinstance(chosen, slice) or chosen.start not in (None, 0) or chosen.step not in (None, 1):
        return NotImplemented
    stop = recipe.classes if chosen.stop is None else chosen.stop
    if stop != recipe.classes and not (type(stop) is int and stop > recipe.classes):
        if type(stop) is not int or stop <= 0 or recipe.caller is not None or recipe.in_shards:
            return NotImplemented
        recipe = replace(recipe.on_classes(stop), layout="rows" if recipe.layout == "contiguous" else recipe.layout)
    layout = recipe.layout if all(part == slice(None) for part in rows) else "other"
    return derive(logits, recipe.on_rows(lambda hidden: hidden[tuple(rows)], layout=layout), made, is_view=True)


def _register_hook(function: Any, logits: Any, hook: Any) -> Any:
    """Register a backward hook of FSDP, which gathers weights, or of DeepSpeed on the loss of these logits too.

    If the loss is computed outside of the module that is wrapped, its gradients do not pass through these logits.
    """
    module = str(getattr(inner(hook), "__module__", ""))
    if not is_open(logits) or not module.startswith(("torch.distributed.", "deepspeed.")):
        return NotImplemented
    recipe = logits._recipe
    hooked = (*getattr(getattr(hook, "__self__", None), "_modules", ()), *getattr(hook, "args", ()))
    if recipe.caller is None or not any(part is recipe.caller.module for part in hooked):  # it is called again
        logits._recipe, logits._aliases = replace(recipe, hooks=(*recipe.hooks, hook)), False
    with torch._C.DisableTorchFunctionSubclass():
        return function(logits, hook)


def _base(function: Any, logits: Any) -> Any:
    """Return None as the base of logits that are not a view of others, although their memory is an expanded view."""
    return None if is_open(logits) and not logits._aliases else NotImplemented


_OPTIONS = "weight size_average ignore_index reduce reduction label_smoothing input target"
_RECORDERS: tuple[tuple[Any, str, list[Any]], ...] = (
    (_cross_entropy, _OPTIONS, [F.cross_entropy]),
    (_tanh, "", [F.tanh, torch.tanh, Tensor.tanh]),
    (_add, "", [torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__]),
    (_multiply, "", [torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__]),
    (_divide, "", [torch.div, torch.true_divide, Tensor.div, Tensor.__truediv__]),
    (_to, "dtype device non_blocking", [Tensor.to, Tensor.float]),
    (_copy, "", [Tensor.contiguous, torch.clone, Tensor.clone]),
    (_detach, "", [Tensor.detach]),
    (_reshape, "start_dim end_dim", [Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten]),
    (_take, "", [Tensor.__getitem__]),
    (_register_hook, "", [Tensor.register_hook]),
    (_base, "", [getter("_base")]),
)
for _recorder, _names, _functions in _RECORDERS:
    KNOWN.update(dict.fromkeys(_functions, (_recorder, frozenset(_names.split()))))
