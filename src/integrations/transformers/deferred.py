"""Deferred logits: a tensor subclass whose values are computed only if something reads them.

A patched head returns `DeferredLogits` instead of the product. They hold a `Recipe`: the matrix products to sum, and
what `xent.linear_cross_entropy` does to the sum. Calls that models make between head and loss (`calls`) return other
deferred logits, which keep the call. The loss is computed from the hidden states. Every other operation gets real
logits, the same that the unpatched model would have computed. Real logits are computed once and kept, so that in-place
writes, hooks and retained gradients behave as usual.

Three mechanisms intercept operations. `__torch_function__` sees all calls from Python. `__torch_dispatch__` sees calls
from C++ and from inside an autograd.Function. For the latter, a node in the autograd graph (`_Edge`) passes gradients
on to hidden states and weight.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from xent.integrations.transformers.history import Origin, check_gathered, check_unchanged, local, looks, note

__all__ = [
    "KNOWN",
    "DeferredLogits",
    "Recipe",
    "autocast_dtype",
    "defer",
    "derive",
    "getter",
    "identity",
    "is_open",
    "real",
    "run",
    "unhandled",
]


@dataclass(frozen=True, eq=False)
class Recipe:
    """softcap * tanh(scale * (sum of hidden @ weight.T + bias + offset) / softcap), or without tanh."""

    hidden: tuple[Tensor, ...]
    """Each (..., D). There are several if LoRA adds a product."""
    weights: tuple[Tensor, ...]
    """Each (V, D), or a DTensor with the classes in shards."""
    bias: Tensor | None
    origins: tuple[Origin, ...]
    """The hidden states, weights and constants from which the logits are computed."""
    calls: tuple[int, ...]
    """The entries of the calls of heads in the model's history."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    autocast: torch.dtype | None
    """The dtype of matrix products under autocast, or None."""
    caller: Callable[..., Tensor] | None = None
    """(hidden states, task=) -> task(hidden states, weight, bias) in a call of the head, which gathers its weight."""
    made: tuple[Any, ...] | None = None
    """(function, args, kwargs) of the recorded call that made these logits; None if a head did."""
    is_view: bool = False
    """Whether they are a view of the logits in that call."""
    offset: Tensor | None = None
    """(V,) or (1, ..., 1, V): a constant that the model adds to its logits, such as final_logits_bias."""
    scale: float = 1.0
    softcap: float | None = None
    steps: tuple[str, ...] = ()
    """The operations after the product, in words."""
    placement: Any = None
    """Of logits that replace a DTensor: replicated, or in shards over the classes."""
    tracked: bool = True
    """Whether autograd records them: gradients were enabled, and one of the origins requires a gradient."""
    hooks: tuple[Callable[[Tensor], Any], ...] = ()
    """Hooks of FSDP and DeepSpeed on the gradient of the logits, for the gradient of what is computed from them."""

    @property
    def in_shards(self) -> bool:
        """Whether the classes are in shards over the ranks of a mesh."""
        return hasattr(self.weights[0], "placements")

    @property
    def gathers(self) -> bool:
        """Whether the weight is freed, so that it must be gathered: by ZeRO-3, FSDP1, or an FSDP2 group."""
        weight = self.weights[0]
        return self.caller is not None and (hasattr(weight, "ds_id") or not local(weight).untyped_storage().nbytes())

    def on_rows(self, change: Callable[[Tensor], Tensor]) -> "Recipe":
        """Return the recipe with `change` applied to the hidden states, to reshape or select rows."""
        return replace(self, hidden=tuple([change(each) for each in self.hidden]))

    def hooked(self, made: Tensor) -> Tensor:
        """Return the logits or the loss with the hooks."""
        for hook in self.hooks if made.requires_grad else ():
            made.register_hook(hook)
        return made


def run(recipe: Recipe, task: Callable[..., Tensor]) -> Tensor:
    """Return task(hidden, weights, bias) of tuples, under the autocast of the recipe and with gathered weights."""
    device = recipe.hidden[0].device.type
    same = autocast_dtype(device) == recipe.autocast
    with nullcontext() if same else torch.autocast(device, recipe.autocast, enabled=recipe.autocast is not None):
        if recipe.caller is None or not recipe.gathers:
            return task(recipe.hidden, recipe.weights, recipe.bias)
        return recipe.caller(*recipe.hidden, task=lambda hidden, weight, bias: task((hidden,), (weight,), bias))


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast on a device type, or None if autocast is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def unhandled(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function without `__torch_function__` of its arguments."""
    return Tensor.__torch_function__(function, (), args, kwargs)


def getter(attribute: str) -> Any:
    """Return the function that `__torch_function__` receives when an attribute is read."""
    return getattr(Tensor, attribute).__get__


_ATTRIBUTES = "shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_meta is_quantized is_sparse"
_METHODS = "size dim ndimension numel nelement __len__ __hash__ is_floating_point is_complex"
KNOWN: dict[Any, Callable[..., Any]] = dict.fromkeys(
    [
        *[getter(name) for name in _ATTRIBUTES.split()],
        *[getattr(Tensor, name) for name in _METHODS.split()],
        *(torch.numel, torch.is_floating_point, torch.is_complex),
    ],
    unhandled,
)
"""Function -> (function, its arguments) -> the result, or NotImplemented, which means that it needs real logits.

Those here need no values. `calls` adds the calls that are recorded.
"""


def _blank(like: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the memory of deferred logits: a single NaN, expanded to their size.

    It is a custom operation because torch.compile would materialise an expanded tensor that a graph returns; the result
    of a custom operation is returned unchanged.
    """
    return like.new_full((), torch.nan, dtype=dtype).expand(size)


_memory: Any = torch.library.custom_op("xent::blank", _blank, mutates_args=())
_memory.register_fake(_blank)


class DeferredLogits(torch.Tensor):
    """Logits (..., V) of a language model that are computed when something reads them. Only `defer` creates them.

    Shape, dtype and device are known without computing anything.
    """

    _recipe: Recipe
    _real: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from shape, dtype and device, or record the call, or execute it with real logits."""
        kwargs = {} if kwargs is None else kwargs
        if _is_described():
            return unhandled(func, *args, **kwargs)
        if func in KNOWN:
            made = KNOWN[func](func, *args, **kwargs)
            if made is not NotImplemented:
                return made
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: real(logits, func), (args, kwargs))
        return func(*args, **kwargs)


class _DispatchedLogits(DeferredLogits):
    """Deferred logits outside of torch.compile, which cannot create tensors that have __torch_dispatch__."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch declares the disabled implementation
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Execute a call from C++ with values. `_Edge` handles its gradients."""
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: _values(logits, func), (args, kwargs or {}))
        return func(*args, **kwargs)


class _LogitsInShards(_DispatchedLogits):
    """Deferred logits that replace a DTensor, with its attributes and methods."""

    @property
    def device_mesh(self) -> Any:
        """The mesh of the weight."""
        return self._recipe.weights[0].device_mesh  # type: ignore[attr-defined]

    @property
    def placements(self) -> Any:
        """The placements of the DTensor that the unpatched head would return."""
        placement = self._recipe.placement
        return (type(placement)(self.ndim - 1) if placement.is_shard() else placement,)

    def redistribute(self, device_mesh: Any = None, placements: Any = (), **kwargs: Any) -> Any:
        """Record a gather of the shards, or nothing if the placement stays the same."""
        wanted, (placement,) = placements[0], self.placements
        if wanted == placement or (wanted.is_shard(-1) and placement.is_shard()):
            return self
        return self._call(wanted.is_replicate(), "redistribute", wanted, device_mesh, placements, **kwargs)

    def to_local(self, **kwargs: Any) -> Any:
        """Record the conversion of gathered logits to a plain tensor; for logits in shards compute them."""
        return self._call(self._recipe.placement.is_replicate(), "to_local", None, **kwargs)

    def full_tensor(self, **kwargs: Any) -> Any:
        """Record a gather of the shards into a plain tensor."""
        return self._call(True, "full_tensor", None, **kwargs)

    def _call(self, known: bool, name: str, placement: Any, *args: Any, **kwargs: Any) -> Any:
        if known and is_open(self) and not kwargs.keys() - {"async_op"}:
            made: Any = methodcaller(name, *args, **kwargs), (self,), {}
            return derive(replace(self._recipe, placement=placement), made)
        return getattr(real(self, getattr(self, name)), name)(*args, **kwargs)


def defer(recipe: Recipe) -> DeferredLogits:
    """Return deferred logits."""
    sources = [each.source for each in recipe.origins]
    tracked = recipe.tracked and torch.is_grad_enabled() and any(source.requires_grad for source in sources)
    recipe = replace(recipe, tracked=tracked)
    if torch.compiler.is_compiling():
        logits = DeferredLogits(_memory(sources[0].detach(), recipe.size, recipe.dtype))
    else:
        logits = _Edge.apply(recipe, *(dict.fromkeys(sources) if tracked else ()))
    logits._recipe, logits._real = recipe, None
    return logits


def derive(recipe: Recipe, made: tuple[Any, ...], like: Tensor | None = None) -> DeferredLogits:
    """Return the deferred logits of a recorded call, with the shape, strides and dtype of `like`."""
    if like is not None:
        recipe = replace(recipe, size=tuple(like.shape), stride=like.stride(), dtype=like.dtype)
    return defer(replace(recipe, made=made, is_view=like is not None and like._base is not None))


def is_open(logits: Any) -> bool:
    """Whether these are deferred logits that were not computed, and to which no other autograd node is attached."""
    if not isinstance(logits, DeferredLogits) or logits._real is not None:
        return False
    if logits._recipe.is_view and not is_open(logits._recipe.made[1][0]):  # type: ignore[index]
        return False
    return logits._recipe.tracked or not logits.requires_grad


def real(logits: DeferredLogits, function: Any) -> Tensor:
    """Return the real logits, the same tensor each time. `function` is the function that reads them."""
    if logits._real is None:
        tracked, followed = logits._recipe.tracked, logits.requires_grad
        with _as_at_the_call(), torch.set_grad_enabled(tracked or followed):
            if tracked or not followed:
                made = _read(logits, function, real)
                made = made if logits._recipe.is_view else logits._recipe.hooked(made)
            else:
                made = unhandled(Tensor.clone, logits)  # another Function returned them: continue at its node
            logits._real = made
    return logits._real


def _values(logits: DeferredLogits, function: Any) -> Tensor:
    if logits._real is not None:
        return logits._real.detach()
    with torch.no_grad():
        return _read(logits, function, _values)


def _read(logits: DeferredLogits, function: Any, read: Callable[..., Tensor]) -> Tensor:
    """Compute logits, or the view of logits that `read` returns. Raise RuntimeError if the weights have changed."""
    recipe = logits._recipe
    if recipe.is_view:
        view, (base, *arguments), options = recipe.made  # type: ignore[misc]
        viewed: Tensor = view(read(base, function), *arguments, **options)
        return viewed
    check_unchanged(recipe.origins)
    reason = looks(function)
    for call in recipe.calls:
        note(call, "computed", reason)
    return _compute(recipe)


def _compute(recipe: Recipe) -> Tensor:
    """Compute logits with the operations that the model called, in their order and dtypes."""
    if recipe.made is None:
        made: Any = run(recipe, partial(_product, recipe.origins))
        return made.full_tensor() if recipe.in_shards and recipe.placement is None else made  # type: ignore[no-any-return]
    function, args, kwargs = recipe.made
    args = tuple([_compute(each._recipe) if isinstance(each, DeferredLogits) else each for each in args])
    computed: Tensor = function(*args, **kwargs)
    return computed


def _product(origins: Any, hidden: Any, weights: Any, bias: Tensor | None) -> Tensor:
    check_gathered(origins, (*weights, bias))
    return _linear(hidden[0], weights[0], bias)


def _linear(hidden: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Return a product. If the weight is a DTensor, so is the product, as in PyTorch's ColwiseParallel."""
    if hasattr(weight, "placements"):
        from torch.distributed.tensor import DTensor, Replicate

        hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    return F.linear(hidden, weight, bias)


@contextmanager
def _as_at_the_call() -> Iterator[None]:
    """Leave inference mode and checkpoints that were entered after the head was called.

    The logits are kept for later reads. Tensors made in inference mode cannot be used by autograd later. A checkpoint
    with use_reentrant=False would find kept logits when it computes its region again, and save fewer tensors.
    """
    if torch.compiler.is_compiling():
        yield
        return
    with torch.inference_mode(False), saved_tensors_hooks(identity, identity):
        yield


def identity(tensor: Tensor) -> Tensor:
    """Return the tensor."""
    return tensor


def _is_described() -> bool:
    """Whether torch.compile inspects an argument of a compiled function, which needs the deferred tensor itself."""
    return not torch.compiler.is_dynamo_compiling() and TracingContext.try_get() is not None


class _Edge(torch.autograd.Function):
    """(recipe, *its tensors) -> deferred logits; backward passes their gradient to the tensors."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *tensors: Tensor) -> Tensor:
        ctx.recipe, ctx.tensors = recipe, tensors
        made: Tensor = _memory(recipe.origins[0].source, recipe.size, recipe.dtype)
        return made.as_subclass(_DispatchedLogits if recipe.placement is None else _LogitsInShards)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        recipe, wanted = ctx.recipe, ctx.needs_input_grad[1:]
        check_unchanged(recipe.origins)
        for hook in recipe.hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if recipe.gathers:
            raise RuntimeError(
                "the logits of a patched model reached an operation that xent cannot follow, and their gradient needs "
                "the head's weight, which is gathered only during its calls (ZeRO-3, FSDP1, an FSDP2 group of its "
                "own): shard the head with the rest of the model, or call "
                "xent.integrations.transformers.unpatch(model)"
            )
        asked = [tensor for tensor, asks in zip(ctx.tensors, wanted, strict=True) if asks]
        again = torch.is_grad_enabled()  # True with create_graph=True
        with torch.enable_grad():
            logits = _compute(recipe)
        found = iter(torch.autograd.grad(logits, asked, gradient, create_graph=again))
        return None, *[next(found) if asks else None for asks in wanted]
