"""The calls that deferred logits record, the losses that are computed from hidden states, and losses of transformers.

Importing this registers the calls; others compute real logits. Most record a step: given the recipe and a tensor
without memory that has the shape, strides and dtype of the logits, a step returns the recipe after the call and the
tensor that the call makes of this one. It returns None if it cannot record the call.
"""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.checkpoint import checkpoint

import xent
from xent.core.chunks import rows_per_chunk
from xent.integrations.transformers.deferred import (
    KNOWN,
    DeferredLogits,
    Function,
    Recipe,
    Result,
    Tensors,
    autocast_dtype,
    check_unchanged,
    derive,
    identity,
    is_open,
    origin,
    run,
    shards,
    unhandled,
)
from xent.integrations.transformers.history import note
from xent.integrations.trl import row_entropy

__all__ = ["causal_lm_loss", "factors", "smooth_from_hidden_states"]

_After = tuple[Recipe, Tensor] | None
"""What a step returns."""


def _functions(names: str) -> list[Function]:
    functions = [getattr(place, name, None) for name in names.split() for place in (Tensor, torch, F)]
    return list(filter(callable, functions))


_DIVIDES = tuple(_functions("div true_divide __truediv__"))  # Dynamo of PyTorch 2.8 does not look into a frozenset


def _scale(recipe: Recipe, like: Tensor, function: Function, factor: Any) -> _After:
    """Record a multiplication or division by a number. After tanh it must stay a softcap, which is positive."""
    if type(factor) not in (int, float) or not math.isfinite(factor) or factor == 0:
        return None
    times, applied = (1 / factor, "divided") if function in _DIVIDES else (factor, "multiplied")
    softcap = recipe.softcap and recipe.softcap * times
    if softcap is not None and softcap <= 0:
        return None
    recipe = recipe.then(f"{applied} by {factor}", scale=recipe.scale * times, softcap=softcap)
    return recipe, function(like, factor)


def _tanh(recipe: Recipe, like: Tensor, function: Function) -> _After:
    """Record a tanh, which is part of a softcap."""
    if recipe.softcap is not None:
        return None
    return recipe.then("tanh", softcap=1.0), function(like)


def _add(recipe: Recipe, like: Tensor, function: Function, other: Any) -> _After:
    """Record the sum of two heads (LoRA), or of logits and one constant per class (final_logits_bias)."""
    changed = recipe.scale != 1 or recipe.softcap is not None or recipe.is_moved or recipe.caller is not None
    if not isinstance(other, Tensor) or changed or recipe.in_shards:
        return None
    if isinstance(other, DeferredLogits):
        theirs = other._recipe
        alike = (theirs.size, theirs.autocast, theirs.device) == (recipe.size, recipe.autocast, recipe.device)
        if not is_open(other) or not alike or theirs.softcap is not None or theirs.caller is not None:
            return None
        recipe = recipe.then(
            "1 more product added (LoRA)",
            hidden=recipe.hidden + tuple([each * theirs.scale for each in theirs.hidden]),
            weights=recipe.weights + theirs.weights,
            origins=recipe.origins + theirs.origins,
            call=max(recipe.call, theirs.call),
        )
        term, numbers = torch.empty_like(like, dtype=theirs.dtype), theirs.bias
        numbers = None if numbers is None else (numbers * theirs.scale).to(recipe.hidden[0].dtype)
    else:
        fits = other.ndim <= like.ndim and other.shape == (*[1] * (other.ndim - 1), *recipe.size[-1:])
        plain = type(other) in (Tensor, Parameter) and other.device == recipe.device
        if not fits or not plain or other.dtype not in (recipe.autocast, recipe.hidden[0].dtype):
            return None
        recipe = recipe.then("a number for each class added", origins=(*recipe.origins, origin("weights", other)))
        term, numbers = torch.empty_like(other, device="meta"), other.flatten()
    if numbers is not None:
        recipe = replace(recipe, bias=numbers if recipe.bias is None else recipe.bias[: len(numbers)] + numbers)
    return recipe, function(like, term)


def _to(recipe: Recipe, like: Tensor, function: Function, *args: Any, **kwargs: Any) -> _After:
    """Record a move to another device, or a conversion to a dtype that is at least as wide as that of the product.

    PEFT's adapters may be float32 where the head is bfloat16: their sum is then converted back.
    """
    converted, narrowest = function(recipe.empty(), *args, **kwargs), recipe.autocast or recipe.hidden[0].dtype
    dtype, device = converted.dtype, converted.device
    if torch.promote_types(dtype, narrowest) != dtype:
        return None
    if (dtype, device) == (recipe.dtype, recipe.device):
        return recipe, like
    return recipe.then(f"converted to {dtype} on {device}", device=device), like.to(dtype)


def _reshape(recipe: Recipe, like: Tensor, function: Function, *args: Any, **kwargs: Any) -> _After:
    """Record a copy, or a reshape of the leading axes."""
    shaped = function(like, *args, **kwargs)
    if shaped is like:  # `contiguous` of contiguous logits
        return recipe, like
    if shaped.shape[-1:] != like.shape[-1:] or shaped.dtype != like.dtype:
        return None
    return recipe.on_rows(lambda hidden: hidden.reshape(*shaped.shape[:-1], hidden.shape[-1])), shaped


def _take(recipe: Recipe, like: Tensor, function: Function, index: Any) -> _After:
    """Record an index: slices of rows and of the first classes, or one boolean mask of rows."""
    if isinstance(index, Tensor):
        if index.dtype != torch.bool or index.ndim >= like.ndim:
            return None
        recipe = recipe.on_rows(lambda hidden: hidden[index.to(hidden.device)])
        return recipe, like.new_empty((*recipe.hidden[0].shape[:-1], like.shape[-1]))
    parts = index if isinstance(index, tuple) else (index,)
    if not all(type(part) in (int, slice, type(...)) for part in parts):
        return None
    taken = function(like, index)
    if len(parts) >= like.ndim or Ellipsis in parts[:-1]:  # the last part is of the classes
        chosen, stop = parts[-1], taken.shape[-1] if taken.ndim else 0
        first = isinstance(chosen, slice) and chosen.start in (None, 0) and chosen.step in (None, 1)
        if not first or stop == 0 or (recipe.in_shards and stop != like.shape[-1]):
            return None
        parts = (*parts[:-1], slice(None))
    return recipe.on_rows(lambda hidden: hidden[parts]), taken


def _record(step: Callable[..., _After], function: Function, *args: Any, **kwargs: Any) -> Result:
    """Record a step of the first of the arguments that are deferred logits."""
    places = [place for place, each in enumerate(args) if is_open(each)]
    if not places or (kwargs and step not in (_to, _reshape)) or (places[0] > 0 and step is not _add):
        return NotImplemented
    place = places[0]
    if function is Tensor.__getitem__ and isinstance(args[1], Tensor):
        args = args[0], args[1].clone()  # the caller may change the mask before the logits are read
    recipe = args[place]._recipe
    like = torch.empty_strided(recipe.size, recipe.stride, dtype=recipe.dtype, device="meta")
    recorded = step(recipe, like, function, *args[:place], *args[place + 1 :], **kwargs)
    if recorded is None:
        return NotImplemented
    return args[place] if recorded[0] is recipe else derive(recorded[0], (function, args, kwargs), recorded[1])


def _detach(function: Function, logits: Tensor) -> Result:
    """Record what DeepSpeed's ZeRO-3 does in a Function of its own to all outputs of a model."""
    if not is_open(logits) or not logits._recipe.gathers or torch.is_grad_enabled():
        return NotImplemented
    with torch.enable_grad():
        return derive(logits._recipe, (identity, (logits,), {}))


def _register_hook(function: Function, logits: Tensor, hook: Function) -> Result:
    """Register a backward hook of FSDP, which gathers weights, or of DeepSpeed on the loss of these logits too.

    If the loss is computed outside of the module that is wrapped, its gradients do not pass through these logits.
    """
    if not is_open(logits) or not shards(hook):
        return NotImplemented
    logits._recipe = replace(logits._recipe, hooks=(*logits._recipe.hooks, hook), is_view=False)
    return unhandled(function, logits, hook)


def _base(function: Function, logits: Tensor) -> Result:
    """Return None as the base of logits that are not a view of others, although their memory is an expanded view."""
    return None if is_open(logits) and not logits._recipe.is_view else NotImplemented


def factors(
    recipe: Recipe, hidden: Tensors, weights: Tensors, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states (..., D), weight (V, D) and bias (V,) of a single product, which is a sum of products."""
    input, weight, classes = hidden[0], weights[0], recipe.size[-1]
    if len(weights) > 1:
        input = torch.cat([each.to(input.dtype) for each in hidden], -1)
        weight = torch.cat([each.to(weight.dtype) for each in weights], -1)
    if weight.shape[0] != classes:  # the first classes were taken
        weight, bias = weight[:classes], None if bias is None else bias[:classes]
    return input, weight, bias


def _loss(logits: DeferredLogits, target: Tensor, **options: Any) -> Tensor:
    """Return `xent.linear_cross_entropy` of deferred logits (..., V) and targets (...), on the device of the logits."""
    recipe = logits._recipe
    check_unchanged(recipe.origins, looked_at=False)
    if recipe.is_moved:
        target, options = tree_map_only(Tensor, lambda each: each.to(recipe.hidden[0].device), (target, options))

    def task(*arrays: Any) -> Any:
        input, weight, bias = factors(recipe, *arrays)
        if recipe.is_planned:  # ranks need not compare the number of tokens, for which the host would wait
            mesh, classes = cast(Any, weight).device_mesh, weight.shape[0]
            first = min(mesh.get_local_rank() * -(-classes // mesh.size()), classes)
            options["vocab_parallel"] = xent.VocabParallel(mesh, first=first, size=classes)
        return xent.linear_cross_entropy(
            input, weight, target, linear_bias=bias, logit_scale=recipe.scale, softcap=recipe.softcap, **options
        )

    with nullcontext() if recipe.tracked else torch.no_grad():
        loss = recipe.hooked(run(recipe, task)).to(recipe.device)
    note(recipe.call, "fused", ", ".join(recipe.steps))
    return loss


def _by_rows(function: Function, logits: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Result:
    """Return a function over the classes, from logits that are computed in chunks of rows, and again for a gradient."""
    if not is_open(logits) or type(dim) is not int or dim not in (-1, logits.ndim - 1) or "out" in kwargs:
        return NotImplemented
    recipe, shape = logits._recipe, logits.shape[:-1]
    rows, tracks, softcap = shape.numel(), recipe.tracked and torch.is_grad_enabled(), recipe.softcap or 1.0
    most = rows_per_chunk(rows, recipe.size[-1], recipe.dtype.itemsize, None, logits.device.type)
    is_large = function in _SOFTMAX and (tracks or rows > most)  # the result takes as much as the logits
    if is_large or recipe.in_shards or (tracks and recipe.gathers) or torch.compiler.is_compiling():
        return NotImplemented

    def task(*arrays: Any) -> Any:
        check_unchanged(recipe.origins, looked_at=False)
        x = F.linear(*factors(recipe, *arrays)).to(recipe.device, recipe.dtype).mul_(recipe.scale / softcap)
        return function(x if recipe.softcap is None else x.tanh_() * softcap, -1, *args, **kwargs)

    chunk = max(rows, 1) if function in _SOFTMAX else most // 4 + 1  # functions need several arrays of its size
    parts = zip(*[each.reshape(rows, each.shape[-1]).split(chunk) for each in recipe.hidden], strict=True)
    with torch.set_grad_enabled(tracks):
        results = [checkpoint(run, replace(recipe, hidden=part), task, use_reentrant=False) for part in parts]
    return tree_map(lambda *each: recipe.hooked(torch.cat(each).reshape((*shape, *each[0].shape[1:]))), *results)


def _top_k(function: Function, logits: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Result:
    """Return `function`, a topk, over the classes, as `_by_rows` does."""
    return _by_rows(lambda x, dim, *rest, **more: function(x, k, dim, *rest, **more), logits, dim, *args, **kwargs)


def _split(function: Function, logits: Tensor, size: Any, dim: int = 0) -> Result:
    """Record a split of the first axis into parts of one size."""
    known = is_open(logits) and type(size) is int and size > 0 and dim == 0
    return tuple([logits[first : first + size] for first in range(0, len(logits), size)]) if known else NotImplemented


def _cross_entropy(
    function: Function, input: Any, target: Any, size_average: Any = None, reduce: Any = None, **options: Any
) -> Result:
    """Return `function`, torch.nn.functional.cross_entropy, of deferred logits (N, V) or (V,), or NotImplemented.

    The result has the dtype that PyTorch's has: that of the logits, or float32 under autocast.
    """
    is_known = size_average is None and reduce is None and is_open(input) and input.ndim <= 2
    if not is_known or not isinstance(target, Tensor) or isinstance(target, DeferredLogits):
        return NotImplemented
    if not target.is_floating_point() and target.shape != input.shape[:-1]:
        raise ValueError(
            f"labels must hold one class for each of the {input.shape[:-1].numel()} rows of logits, got shape "
            f"{tuple(target.shape)}: pass labels of the shape of input_ids, and with logits_to_keep, or shift_labels, "
            "only those of the positions that are kept"
        )
    loss = _loss(input, target, **options)
    autocast = autocast_dtype(input.device.type) is not None
    return loss.to(torch.promote_types(input.dtype, torch.float32) if autocast else input.dtype)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute transformers' loss of a causal language model from logits, with `xent.cross_entropy`.

    Set ``model.loss_function = causal_lm_loss``. The model still computes all logits; this saves their float32 copy and
    the float32 copy of their gradient. `patch` saves the logits as well, and needs no loss function.

    Parameters
    ----------
    logits : tensor (..., T, V), float
        The final logits of the model, after its scale or softcap.
    labels : integer tensor (..., T), optional
        The tokens; position t predicts token t + 1. Ignored if ``shift_labels`` is given.
    vocab_size : int
        V.
    num_items_in_batch : int or 0-d tensor, optional
        The divisor of the sum over tokens: the token count over all micro-batches and ranks. By default, the number of
        tokens of this call that are not ignored.
    ignore_index : int
        Labels with this value are ignored.
    shift_labels : integer tensor (..., T), optional
        The target of each position, already shifted.
    **kwargs
        Other arguments that the model passes to its loss function. They are ignored, as in transformers.

    Returns
    -------
    loss : 0-d tensor, float32

    Raises
    ------
    ValueError
        There are no labels, or their number of positions differs from that of the logits.

    Examples
    --------
    >>> import torch
    >>> from xent.integrations.transformers import causal_lm_loss
    >>> causal_lm_loss(torch.zeros(1, 3, 8), torch.tensor([[1, 2, 3]]), vocab_size=8)
    tensor(2.0794)
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("labels or shift_labels must be given, got neither")
        shift_labels = F.pad(labels.long(), (0, 1), value=ignore_index)[..., 1:]
    target, flat = shift_labels.reshape(-1).to(logits.device), logits.view(-1, vocab_size)
    if len(target) != len(flat):
        raise ValueError(f"labels must hold one token for each of the {len(flat)} positions, got {len(target)}")
    call: Function = _loss if is_open(flat) else xent.cross_entropy
    normalizer = _on_device_of(num_items_in_batch, logits)
    return call(flat, target, ignore_index=ignore_index, normalizer=normalizer)  # type: ignore[no-any-return]


def _on_device_of(number: Any, logits: Any) -> Any:
    """Return a number, on the device of the logits if it is on another accelerator."""
    return number.to(logits.device) if isinstance(number, Tensor) and not number.is_cpu else number


def smooth_from_hidden_states(smooth: Function) -> Function:
    """Return a LabelSmoother.__call__ that computes the loss of deferred logits from hidden states."""

    @functools.wraps(smooth)
    def smoothed(self: Any, model_output: Any, labels: Tensor, shift_labels: bool = False, **kwargs: Any) -> Any:
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if not is_open(logits) or labels.shape != logits.shape[:-1]:
            return smooth(self, model_output, labels, shift_labels, **kwargs)
        return _loss(
            logits,
            labels,
            ignore_index=self.ignore_index,
            label_smoothing=self.epsilon,
            # Older releases of transformers 5 do not pass it.
            normalizer=_on_device_of(kwargs.get("num_items_in_batch"), logits),
            shift=int(shift_labels),
        )

    return smoothed


_STEPS: dict[str, Callable[..., _After]] = {
    "tanh": _tanh,
    "add __add__ __radd__": _add,
    "mul multiply __mul__ __rmul__ div true_divide __truediv__": _scale,
    "to float cuda": _to,
    "contiguous clone view reshape flatten": _reshape,
    "__getitem__": _take,
}
"""Names of functions and methods of PyTorch -> their step."""

_SOFTMAX = _functions("softmax log_softmax")
_ATTRIBUTES = "shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_meta is_quantized is_sparse"
_METHODS = "size dim ndimension numel nelement __len__ __hash__ is_floating_point is_complex"
"""Names of attributes and methods that need no values."""
_GETTERS = [getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()]
"""The functions that `__torch_function__` receives when attributes are read."""

KNOWN.update(
    dict.fromkeys([*_GETTERS, *_functions(_METHODS)], unhandled)
    | {function: functools.partial(_record, step) for names, step in _STEPS.items() for function in _functions(names)}
    | dict.fromkeys([row_entropy, *_SOFTMAX, *_functions("argmax max logsumexp")], _by_rows)
    | dict.fromkeys(_functions("topk"), _top_k)
    | dict.fromkeys(_functions("split"), _split)
    | {F.cross_entropy: _cross_entropy, Tensor.detach: _detach, Tensor.register_hook: _register_hook}
    | {cast(Any, Tensor._base).__get__: _base}
)
