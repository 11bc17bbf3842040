"""The calls that deferred logits record in their recipe; others compute real logits. Importing this registers them.

A recorder gets the called function and its arguments. It returns deferred logits, or NotImplemented if it cannot record
the call. Most record a step: given the recipe and a tensor without memory that has the shape, strides and dtype of the
logits, a step returns the recipe after the call and the tensor that the call makes of this one, or None.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xent.integrations.transformers.changes import origin
from xent.integrations.transformers.deferred import KNOWN, DeferredLogits, defer, derive, getter, identity, is_open
from xent.integrations.transformers.history import inner
from xent.integrations.transformers.loss import cross_entropy
from xent.integrations.transformers.recipe import Recipe

__all__: list[str] = []

_Made = tuple[Recipe, Tensor] | None


def _scale(recipe: Recipe, like: Tensor, function: Any, factor: Any) -> _Made:
    """Record a multiplication or division by a number. After tanh it must stay a softcap, which is positive."""
    if type(factor) not in (int, float) or not math.isfinite(factor) or factor == 0:
        return None
    divides = function in (torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__)
    times, said = 1 / factor if divides else factor, f"{'divided' if divides else 'multiplied'} by {factor}"
    recipe = replace(recipe, steps=(*recipe.steps, said))
    if recipe.bound is None:
        recipe = replace(recipe, scale=recipe.scale * times)
    elif times > 0:
        recipe = replace(recipe, bound=recipe.bound * times)
    else:
        return None
    return recipe, function(like, factor)


def _tanh(recipe: Recipe, like: Tensor, function: Any) -> _Made:
    """Record a tanh, which is part of a softcap."""
    if recipe.bound is not None:
        return None
    return replace(recipe, bound=1.0, steps=(*recipe.steps, "tanh")), function(like)


def _add(recipe: Recipe, like: Tensor, function: Any, other: Any) -> _Made:
    """Record the sum of two heads (LoRA), or of logits and one constant per class (final_logits_bias)."""
    if not isinstance(other, Tensor) or recipe.steps or recipe.offset is not None or recipe.in_shards:
        return None
    if isinstance(other, DeferredLogits):
        theirs = other._recipe
        parts = theirs.bias, theirs.offset, theirs.bound, theirs.caller, recipe.caller
        alike = (theirs.size, theirs.dtype, theirs.autocast) == (recipe.size, recipe.dtype, recipe.autocast)
        if not is_open(other) or not alike or theirs.in_shards or any(part is not None for part in parts):
            return None
        added = [replace(each, scale=each.scale * theirs.scale) for each in theirs.products]
        recipe = replace(recipe, products=(*recipe.products, *added), calls=(*recipe.calls, *theirs.calls))
        tensors, origins, sum_ = theirs.tensors, theirs.origins, like + like
    else:
        kinds = recipe.dtype, torch.float32 if recipe.autocast is not None else recipe.dtype
        fits = other.ndim <= like.ndim and other.shape[-1:] == recipe.size[-1:] and other.numel() == recipe.size[-1]
        plain = type(other) in (Tensor, Parameter) and other.device == recipe.tensors[0].device
        if not fits or not plain or other.dtype not in kinds:
            return None
        recipe, tensors, origins = replace(recipe, offset=other), (other,), (origin("weights", other),)
        sum_ = like + torch.empty_like(other, device="meta")
    return replace(recipe, tensors=(*recipe.tensors, *tensors), origins=(*recipe.origins, *origins)), sum_


def _to(recipe: Recipe, like: Tensor, function: Any, *args: Any, **kwargs: Any) -> _Made:
    """Record a conversion to a dtype that can represent every value, on the device of the logits."""
    given = {**kwargs, **{"dtype" if isinstance(each, torch.dtype) else "device": each for each in args}}
    dtype, device = given.get("dtype"), given.get("device")
    if function is Tensor.float:
        dtype = torch.float32
    if not isinstance(device, (str, torch.device, type(None))):
        return None
    if device is not None and torch.device(device) != recipe.tensors[0].device:
        return None
    if dtype in (None, recipe.dtype):
        return recipe, like
    if torch.promote_types(dtype, recipe.dtype) != dtype:
        return None
    return replace(recipe, steps=(*recipe.steps, f"converted to {dtype}")), like.to(dtype)


def _copy(recipe: Recipe, like: Tensor, function: Any) -> _Made:
    """Record a copy. `contiguous` makes none of contiguous logits."""
    kept = function is Tensor.contiguous and like.is_contiguous()
    return (recipe, like) if kept else (replace(recipe), function(like))


def _reshape(recipe: Recipe, like: Tensor, function: Any, *args: Any, **kwargs: Any) -> _Made:
    """Record a reshape of the leading axes."""
    shaped = function(like, *args, **kwargs)
    if shaped.shape[-1:] != like.shape[-1:]:
        return None
    return recipe.on_rows(lambda hidden: hidden.reshape(*shaped.shape[:-1], hidden.shape[-1])), shaped


def _take(recipe: Recipe, like: Tensor, function: Any, index: Any) -> _Made:
    """Record an index: slices of rows and of the first classes, or one boolean mask of rows."""
    if isinstance(index, Tensor):
        if isinstance(index, DeferredLogits) or index.dtype != torch.bool or index.ndim >= like.ndim:
            return None
        recipe = recipe.on_rows(lambda hidden: hidden[index])
        return recipe, like.new_empty((*recipe.products[0].hidden.shape[:-1], like.shape[-1]))
    parts = list(index) if isinstance(index, tuple) else [index]
    places = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(places) > 1 or not all(part is Ellipsis or isinstance(part, slice) or type(part) is int for part in parts):
        return None
    taken, place = function(like, index), places[0] if places else len(parts)
    missing = like.ndim - len(parts) + len(places)
    parts[place : place + 1] = [slice(None)] * missing
    rows, chosen = parts[:-1], parts[-1]
    if not isinstance(chosen, slice) or chosen.start not in (None, 0) or chosen.step not in (None, 1):
        return None
    stop = taken.shape[-1]
    if stop != like.shape[-1]:
        if stop == 0 or recipe.caller is not None or recipe.in_shards:
            return None
        products = tuple([replace(each, weight=each.weight[:stop]) for each in recipe.products])
        bias, offset = (None if each is None else each[..., :stop] for each in (recipe.bias, recipe.offset))
        recipe = replace(recipe, products=products, bias=bias, offset=offset)
    return recipe.on_rows(lambda hidden: hidden[tuple(rows)]), taken


def _record(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a step of the first of the arguments that are deferred logits."""
    places = [place for place, each in enumerate(args) if is_open(each)]
    if not places:
        return NotImplemented
    if function is Tensor.__getitem__ and isinstance(args[1], Tensor):
        args = args[0], args[1].clone()  # the caller may change the mask before the logits are read
    logits, place = args[places[0]], places[0]
    recipe = logits._recipe
    like = torch.empty_strided(recipe.size, recipe.stride, dtype=recipe.dtype, device="meta")
    made = _STEP_OF[function](recipe, like, function, *args[:place], *args[place + 1 :], **kwargs)
    if made is None:
        return NotImplemented
    return logits if made[0] is recipe else derive(made[0], (function, args, kwargs), made[1])


def _detach(function: Any, logits: Any) -> Any:
    """Record what DeepSpeed's ZeRO-3 does in a Function of its own to all outputs of a model."""
    if not is_open(logits) or logits._recipe.caller is None or torch.is_grad_enabled():
        return NotImplemented
    with torch.enable_grad():
        return defer(replace(logits._recipe, made=(identity, (logits,), {}), is_view=False))


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
        logits._recipe = replace(recipe, hooks=(*recipe.hooks, hook), is_view=False)
    with torch._C.DisableTorchFunctionSubclass():
        return function(logits, hook)


def _base(function: Any, logits: Any) -> Any:
    """Return None as the base of logits that are not a view of others, although their memory is an expanded view."""
    return None if is_open(logits) and not logits._recipe.is_view else NotImplemented


_STEPS: tuple[tuple[Callable[..., _Made], str, str], ...] = (
    (_tanh, "tanh", ""),
    (_add, "add __add__ __radd__", ""),
    (_scale, "mul multiply __mul__ __rmul__ div true_divide __truediv__", ""),
    (_to, "to float", "dtype device non_blocking"),
    (_copy, "contiguous clone", ""),
    (_reshape, "view reshape flatten", "start_dim end_dim"),
    (_take, "__getitem__", ""),
)
"""A step, the names of its functions and methods in PyTorch, and their keyword arguments."""
_RECORDERS: tuple[tuple[Callable[..., Any], str, str], ...] = (
    *[(_record, names, options) for _, names, options in _STEPS],
    (cross_entropy, "cross_entropy", "weight size_average ignore_index reduce reduction label_smoothing input target"),
    (_detach, "detach", ""),
    (_register_hook, "register_hook", ""),
)


def _functions(names: str) -> list[Any]:
    places = (Tensor, torch, F)
    return [getattr(place, name) for name in names.split() for place in places if hasattr(place, name)]


_STEP_OF = {function: step for step, names, _ in _STEPS for function in _functions(names)}
KNOWN[getter("_base")] = _base, frozenset()
for _recorder, _names, _options in _RECORDERS:
    KNOWN.update(dict.fromkeys(_functions(_names), (_recorder, frozenset(_options.split()))))
