"""Recorders: the functions that record a call on deferred logits in their recipe.

A recorder gets the called function and its arguments. It returns deferred logits, or NotImplemented if it cannot record
the call.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from xent.integrations.transformers.changes import origin
from xent.integrations.transformers.deferred import DeferredLogits, defer, is_open
from xent.integrations.transformers.replaced import inner

__all__ = [
    "add",
    "base_of",
    "clone",
    "detach",
    "divide",
    "flatten",
    "make_contiguous",
    "multiply",
    "register_hook",
    "reshape",
    "take",
    "tanh",
    "to",
    "to_float",
]


def multiply(function: Any, logits: Any, factor: Any) -> Any:
    """Record a multiplication by a number."""
    if not is_open(logits):
        logits, factor = factor, logits
    return _scaled(logits, "mul", factor)


def divide(function: Any, logits: Any, divisor: Any) -> Any:
    """Record a division by a number."""
    return _scaled(logits, "div", divisor)


def _scaled(logits: Any, name: str, factor: Any) -> Any:
    if not is_open(logits) or type(factor) not in (int, float) or not math.isfinite(factor) or factor == 0:
        return NotImplemented
    return _same_rows(logits, logits._recipe.then(name, factor))


def tanh(function: Any, logits: Any) -> Any:
    """Record a tanh, which is part of a softcap."""
    return _same_rows(logits, logits._recipe.then("tanh")) if is_open(logits) else NotImplemented


def add(function: Any, logits: Any, other: Any) -> Any:
    """Record the sum of two heads (LoRA), or of logits and one constant per class (final_logits_bias)."""
    if not is_open(logits):
        logits, other = other, logits
    if not is_open(logits) or not isinstance(other, Tensor):
        return NotImplemented
    return _add_head(logits, other) if isinstance(other, DeferredLogits) else _add_offset(logits, other)


def _add_head(logits: DeferredLogits, other: DeferredLogits) -> Any:
    """Record the sum of the head's product and LoRA's scaled low-rank product."""
    if not is_open(other):
        return NotImplemented
    mine, theirs = logits._recipe, other._recipe
    factors = [step.value for step in theirs.steps if step.name == "mul"]
    alike = logits.shape == other.shape and logits.dtype == other.dtype and mine.autocast == theirs.autocast
    simple = not mine.steps and len(factors) == len(theirs.steps) and theirs.bias is None
    whole = all(part.caller is None and part.offset is None and not part.in_shards for part in (mine, theirs))
    if not alike or not simple or not whole:
        return NotImplemented
    scale = math.prod(factors)
    added = [replace(product, scale=product.scale * scale) for product in theirs.products]
    return _same_rows(
        logits, replace(mine, products=(*mine.products, *added)), origins=(*logits._origins, *other._origins)
    )


def _add_offset(logits: DeferredLogits, offset: Tensor) -> Any:
    """Record the addition of a tensor (V,) or (1, ..., 1, V), if no other operation was recorded before."""
    recipe, classes = logits._recipe, logits.shape[-1]
    fits = offset.ndim <= logits.ndim and offset.shape[-1:] == (classes,) and offset.numel() == classes
    kind = torch.float32 if recipe.autocast is not None else logits.dtype
    if not fits or type(offset) not in (Tensor, Parameter) or offset.device != logits.device:
        return NotImplemented
    if recipe.steps or recipe.in_shards or recipe.offset is not None or offset.dtype not in (logits.dtype, kind):
        return NotImplemented
    origins = (*logits._origins, origin((), (offset,)))
    return _same_rows(logits, replace(recipe, offset=offset), torch.promote_types(logits.dtype, offset.dtype), origins)


def to_float(function: Any, logits: Any) -> Any:
    """Record a conversion to float32."""
    return _in_dtype(logits, torch.float32)


def to(function: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a conversion to another dtype; a device is allowed if it is that of the logits."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    for argument in args:
        if isinstance(argument, torch.dtype):
            dtype = argument
        elif isinstance(argument, (str, torch.device)):
            device = argument
        else:
            return NotImplemented
    if not is_open(logits) or (device is not None and torch.device(device) != logits.device):
        return NotImplemented
    return _in_dtype(logits, logits.dtype if dtype is None else dtype)


def _in_dtype(logits: Any, dtype: torch.dtype) -> Any:
    """Record a conversion to a dtype that can represent every value of the present one."""
    if not is_open(logits):
        return NotImplemented
    if dtype == logits.dtype:
        return logits
    if torch.promote_types(dtype, logits.dtype) != dtype:
        return NotImplemented
    return _same_rows(logits, logits._recipe.then("to", dtype), dtype)


def make_contiguous(function: Any, logits: Any) -> Any:
    """Return the logits, or a contiguous copy if they would not be contiguous."""
    if not is_open(logits):
        return NotImplemented
    return logits if logits._contiguous else _same_rows(logits, logits._recipe)


def clone(function: Any, logits: Any) -> Any:
    """Return new deferred logits with the same recipe."""
    return _same_rows(logits, logits._recipe) if is_open(logits) else NotImplemented


def detach(function: Any, logits: Any) -> Any:
    """Record what DeepSpeed's ZeRO-3 does in a Function of its own to all outputs of a model."""
    if not is_open(logits) or logits._recipe.caller is None or torch.is_grad_enabled():
        return NotImplemented
    with torch.enable_grad():
        return _same_rows(logits, logits._recipe)


def _same_rows(
    logits: DeferredLogits,
    recipe: Any,
    dtype: torch.dtype | None = None,
    origins: Any = None,
) -> DeferredLogits:
    dtype = logits.dtype if dtype is None else dtype
    return defer(recipe, tuple(logits.shape), dtype, logits._origins if origins is None else origins)


def reshape(function: Any, logits: Any, *size: Any) -> Any:
    """Record a reshape of the leading axes. Tensor.view is recorded only if the strides would allow a view."""
    if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)):
        size = tuple(size[0])
    if not is_open(logits) or not size or (function is Tensor.view and not _rows_in_place(logits)):
        return NotImplemented
    classes, rows = logits.shape[-1], size[:-1]
    if size[-1] == -1 and math.prod(rows) * classes == logits.numel():
        size = (*rows, classes)
    if size[-1] != classes or not all(isinstance(length, (int, torch.SymInt)) for length in size):
        return NotImplemented
    contiguous = logits._contiguous or not _rows_in_place(logits)
    return _of_rows(logits, lambda hidden: hidden.reshape(*rows, hidden.shape[-1]), function, (size,), contiguous)


def _rows_in_place(logits: DeferredLogits) -> bool:
    """Whether the rows would have a constant stride in memory, also if the last classes were sliced off."""
    base = logits if logits._view is None else logits._view[0]
    return logits._contiguous or (base._contiguous and base.shape[:-1] == logits.shape[:-1])


def flatten(function: Any, logits: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Record a flattening of leading axes."""
    if not is_open(logits) or end_dim % max(logits.ndim, 1) == logits.ndim - 1:
        return NotImplemented
    contiguous = logits._contiguous or not _rows_in_place(logits)
    arguments = (start_dim, end_dim)
    return _of_rows(logits, lambda hidden: hidden.flatten(start_dim, end_dim), function, arguments, contiguous)


def take(function: Any, logits: Any, index: Any) -> Any:
    """Record an index: slices of rows and of the first classes, or one boolean mask of rows."""
    if not is_open(logits):
        return NotImplemented
    if isinstance(index, Tensor) and not isinstance(index, DeferredLogits):
        if index.dtype != torch.bool or index.ndim >= logits.ndim:
            return NotImplemented
        recipe = logits._recipe.on_rows(lambda hidden: hidden[index])
        return defer(recipe, (*recipe.products[0].hidden.shape[:-1], logits.shape[-1]), logits.dtype, logits._origins)
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is Ellipsis or isinstance(part, slice) or type(part) is int for part in parts):
        return NotImplemented
    ellipses = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) == 1 and len(parts) == logits.ndim + 1:  # it stands for no axis
        del parts[ellipses.pop()]
    reaches_classes = ellipses[0] < len(parts) - 1 if ellipses else len(parts) == logits.ndim
    if len(ellipses) > 1 or len(parts) > logits.ndim + len(ellipses):
        return NotImplemented
    recipe, classes = logits._recipe, logits.shape[-1]
    if reaches_classes:
        chosen = parts[-1]
        if not isinstance(chosen, slice) or chosen.start not in (None, 0) or chosen.step not in (None, 1):
            return NotImplemented
        parts[-1] = slice(None)
        stop = classes if chosen.stop is None else chosen.stop
        if stop != classes and not (type(stop) is int and stop > classes):
            if type(stop) is not int or stop <= 0 or recipe.caller is not None or recipe.in_shards:
                return NotImplemented
            recipe, classes = recipe.on_classes(stop), stop
    whole = all(part is Ellipsis or part == slice(None) for part in parts) and classes == logits.shape[-1]
    rows = tuple(parts)
    contiguous = whole and logits._contiguous
    return _of_rows(logits, lambda hidden: hidden[rows], function, (index,), contiguous, recipe, classes)


def _of_rows(
    logits: DeferredLogits,
    change: Callable[[Tensor], Tensor],
    function: Any,
    arguments: tuple[Any, ...],
    contiguous: bool,
    recipe: Any = None,
    classes: int | None = None,
) -> DeferredLogits:
    """Return deferred logits with `change` applied to the hidden states. They are a view, unless the call copies."""
    recipe = (logits._recipe if recipe is None else recipe).on_rows(change)
    size = (*recipe.products[0].hidden.shape[:-1], logits.shape[-1] if classes is None else classes)
    is_view = logits._contiguous or not contiguous
    view = (logits, function, arguments) if is_view else None
    return defer(recipe, size, logits.dtype, logits._origins, view, contiguous)


def register_hook(function: Any, logits: Any, hook: Any) -> Any:
    """Register a backward hook of FSDP, which gathers weights, or of DeepSpeed on the loss of these logits too.

    If the loss is computed outside of the module that is wrapped, its gradients do not pass through these logits.
    """
    module = str(getattr(inner(hook), "__module__", ""))
    if not is_open(logits) or not module.startswith(("torch.distributed.", "deepspeed.")):
        return NotImplemented
    recipe = logits._recipe
    hooked = (*getattr(getattr(hook, "__self__", None), "_modules", ()), *getattr(hook, "args", ()))
    if recipe.caller is None or not any(part is recipe.caller.module for part in hooked):  # it is called again
        logits._recipe = replace(recipe, hooks=(*recipe.hooks, hook))
        logits._view = None
    with torch._C.DisableTorchFunctionSubclass():
        return function(logits, hook)


def base_of(function: Any, logits: Any) -> Any:
    """Return None as the base of logits that are not a view of others, although their memory is an expanded view."""
    return None if is_open(logits) and logits._view is None else NotImplemented
