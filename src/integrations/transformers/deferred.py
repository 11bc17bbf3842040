"""Deferred logits: a tensor subclass whose values are computed only if something reads them.

A patched head returns `DeferredLogits` instead of the product. They hold a `Recipe`: the matrix products to sum, and
what `xent.linear_cross_entropy` does to the sum. Calls that models make between head and loss (`calls`) return other
deferred logits, which keep the call. The loss is computed from the hidden states. Every other operation gets real
logits, the same that the unpatched model would have computed. Real logits are computed once and kept, so that in-place
writes, hooks and retained gradients behave as usual.

Three mechanisms intercept operations. `__torch_function__` sees all calls from Python. `__torch_dispatch__` sees calls
from C++ and from inside an autograd.Function. For the latter, a node in the autograd graph (`_Edge`) passes gradients
on to hidden states and weight.

Deferred logits that are computed later must not use changed weights. An `_Origin` stores the state of each tensor.
Writes increment a tensor's version counter. Fused optimizers do not: a hook does it after each step, for the
weights of the heads that defer logits. Writes through `parameter.data` increment nothing. For those, it stores the
address of the tensor and a few elements of a weight. Elements are compared only when the logits are read, because that
synchronises with the device.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from xent.backends.torch import private
from xent.integrations.patch import inner
from xent.integrations.transformers.history import looks, note

__all__ = [
    "KNOWN",
    "DeferredLogits",
    "Function",
    "Recipe",
    "Result",
    "Tensors",
    "autocast_dtype",
    "check_unchanged",
    "defer",
    "derive",
    "identity",
    "in_shards",
    "is_open",
    "local",
    "origin",
    "real",
    "run",
    "shards",
    "steps",
    "unhandled",
]


Function = Callable[..., Any]
"""A function or method of PyTorch, or a hook."""
Recorded = tuple[Function, tuple[Any, ...], dict[str, Any]]
"""A call: function, args, kwargs."""
Tensors = tuple[Tensor, ...]


def shards(hook: Function) -> bool:
    """Whether a hook is one of PyTorch's or DeepSpeed's for models in shards, which does not need the logits."""
    return str(getattr(inner(hook), "__module__", "")).startswith(("torch.distributed.", "deepspeed."))


steps: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
"""Each head that defers its logits -> the number of optimizer steps on its weights."""
_MOVED = "moved, replaced, sharded or offloaded (parameter.data = ..., model.to(...), merging an adapter)"


@dataclass(frozen=True, eq=False)
class _Origin:
    """A tensor from which logits are computed, and its state when the head was called."""

    name: str
    source: Tensor
    retained: Tensor | None
    """The tensor, or this process's shard of it. None if FSDP frees what it gathers for the head's call."""
    head: nn.Module | None
    """The head whose optimizer steps count."""
    gathered: bool
    """Whether the weight may be whole only during the head's call."""
    state: dict[str, int]
    """What must stay the same, by the words for a change."""
    sample: Tensor | None
    """Some elements of a weight."""


def origin(name: str, tensor: Tensor, head: nn.Module | None = None, gathered: bool = False) -> _Origin:
    """Return the present state of a tensor: "hidden states" or "weights"."""
    head = None if torch.compiler.is_compiling() else head
    shard = local(tensor)
    retained = None if gathered and shard is tensor else shard
    sample = None if name == "hidden states" else _sample(shard).clone()
    return _Origin(name, tensor, retained, head, gathered, _state(retained, head, gathered), sample)


def _state(tensor: Tensor | None, head: nn.Module | None, gathered: bool) -> dict[str, int]:
    state: dict[str, int] = {} if head is None else {"changed by an optimizer's step": steps.get(head, 0)}
    if tensor is not None:
        compiling = torch.compiler.is_compiling()  # Dynamo cannot trace Tensor.is_inference and addresses
        if not gathered and not compiling:
            state[_MOVED] = tensor.data_ptr()
        state["written to in place"] = tensor._version if compiling or not tensor.is_inference() else 0
    return state


def check_unchanged(origins: Iterable[_Origin], looked_at: bool = True) -> None:
    """Raise RuntimeError if computing the logits would no longer give those of the unpatched model.

    Elements of weights are compared, which synchronises with the device, only if the logits are `looked_at`.
    """
    for record in origins if not torch.compiler.is_compiling() else ():
        now = _state(record.retained, record.head, record.gathered)
        happened = next((words for words, value in record.state.items() if now[words] != value), None)
        if happened is not None:
            raise _changed(record.name, happened)
        if looked_at and record.retained is not None:
            _compare(record, record.retained)


def _compare(record: _Origin, tensor: Tensor) -> None:
    """Raise RuntimeError if the elements of a weight are not those at the head's call; do not look in CUDA graphs."""
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    if record.sample is not None and not torch.allclose(_sample(tensor), record.sample, 0, 0, equal_nan=True):
        raise _changed(record.name, "written to through parameter.data (by hand, or by merging an adapter)")


def _changed(name: str, happened: str) -> RuntimeError:
    return RuntimeError(
        f"these logits were never computed, and cannot be computed now: the {name} were {happened} after the model was "
        "called. Read them before that, for example with outputs.logits.detach(). With FSDP2, keep the outermost group "
        "unsharded after forward: fully_shard(model, reshard_after_forward=False). Or restore the model's own head "
        "with xent.integrations.transformers.unpatch(model)"
    )


def local(weight: Tensor) -> Tensor:
    """Return what this process keeps of a weight: its shard in DeepSpeed's ZeRO-3 or in a DTensor."""
    shard: Any = getattr(weight, "ds_tensor", weight)
    if in_shards(shard):
        with torch.no_grad():
            shard = shard.to_local()
    return shard  # type: ignore[no-any-return]


def in_shards(tensor: object) -> TypeGuard[Any]:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "placements")


def _sample(weight: Tensor) -> Tensor:
    """Return a strided view of some hundred elements of a weight."""
    return weight.detach()[tuple([slice(None, None, max(size // 16, 1)) for size in weight.shape])]


@dataclass(frozen=True, eq=False)
class Recipe:
    """softcap * tanh(scale * (sum of hidden @ weight.T + bias) / softcap), or without tanh."""

    hidden: Tensors
    """Each (..., D). There are several if LoRA adds a product."""
    weights: Tensors
    """Each (V, D), or a DTensor with the classes in shards."""
    bias: Tensor | None
    """(V,): the biases of all heads, and constants that the model adds to its logits, such as final_logits_bias."""
    origins: tuple[_Origin, ...]
    """The hidden states, weights and constants from which the logits are computed."""
    call: int
    """The number of the last call of a head, for the model's history."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    """Of the logits; the head and its hidden states may be on another."""
    autocast: torch.dtype | None
    """The dtype of matrix products under autocast, or None."""
    caller: Any = None
    """(hidden states, task=) -> task(hidden states, weight, bias) in a call of the head, which gathers its weight."""
    recorded: "Recorded | None" = None
    """(function, args, kwargs) of the recorded call that made these logits; None if a head did."""
    is_view: bool = False
    """Whether they are a view of the logits in that call."""
    scale: float = 1.0
    softcap: float | None = None
    steps: tuple[str, ...] = ()
    """The operations after the product, in words."""
    placement: Any = None
    """Of logits that replace a DTensor: replicated, or in shards over the classes."""
    is_planned: bool = False
    """Whether a tensor-parallel plan gives all ranks the same hidden states."""
    tracked: bool = True
    """Whether gradients were enabled, so that autograd records them if one of the origins requires a gradient."""
    hooks: tuple[Function, ...] = ()
    """Hooks of FSDP and DeepSpeed on the gradient of the logits, for the gradient of what is computed from them."""

    @property
    def in_shards(self) -> bool:
        """Whether the classes are in shards over the ranks of a mesh."""
        return in_shards(self.weights[0])

    @property
    def is_moved(self) -> bool:
        """Whether the logits are on another device than the head."""
        return self.device != self.hidden[0].device

    def empty(self) -> Tensor:
        """Return no elements, on the device of the logits and in their dtype."""
        return self.hidden[0].new_empty(0, dtype=self.dtype, device=self.device)

    @property
    def gathers(self) -> bool:
        """Whether the weight is freed, so that it must be gathered: by ZeRO-3, FSDP1, or an FSDP2 group."""
        weight = self.weights[0]
        return self.caller is not None and (hasattr(weight, "ds_id") or not local(weight).untyped_storage().nbytes())

    def then(self, step: str, **changes: Any) -> "Recipe":
        """Return the recipe after an operation, which `step` names."""
        return replace(self, steps=(*self.steps, step), **changes)

    def on_rows(self, change: Callable[[Tensor], Tensor]) -> "Recipe":
        """Return the recipe with `change` applied to the hidden states, to reshape or select rows."""
        return replace(self, hidden=tuple([change(each) for each in self.hidden]))

    def hooked(self, output: Tensor) -> Tensor:
        """Return the logits or the loss with the hooks."""
        for hook in self.hooks if output.requires_grad else ():
            output.register_hook(hook)
        return output


def run(recipe: Recipe, task: Callable[..., Tensor]) -> Any:
    """Return task(hidden, weights, bias) of tuples, under the autocast of the recipe and with gathered weights."""
    with torch.autocast(recipe.hidden[0].device.type, recipe.autocast, enabled=recipe.autocast is not None):
        if not recipe.gathers:
            return task(recipe.hidden, recipe.weights, recipe.bias)
        return recipe.caller(*recipe.hidden, task=lambda hidden, weight, bias: task((hidden,), (weight,), bias))


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast on a device type, or None if autocast is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def unhandled(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Call a function without `__torch_function__` of its arguments."""
    return Tensor.__torch_function__(function, (), args, kwargs)


Result = Any
"""The result of a call, or NotImplemented, which means that it needs real logits."""
KNOWN: dict[Function, Callable[..., Result]] = {}
"""Function -> (function, its arguments) -> result."""


def _blank(like: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the memory of deferred logits: a single NaN, expanded to their size.

    It is a custom operation because torch.compile would materialise an expanded tensor that a graph returns; the result
    of a custom operation is returned unchanged.
    """
    return like.new_full((), torch.nan, dtype=dtype).expand(size)


_memory: Any = torch.library.custom_op("xent::blank", _blank, mutates_args=())
_memory.register_fake(_blank)


class DeferredLogits(Tensor):
    """Logits (..., V) of a language model that are computed when something reads them. Only `defer` creates them.

    Shape, dtype and device are known without computing anything.
    """

    _recipe: Recipe
    _real: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from shape, dtype and device, or record the call, or execute it with real logits."""
        kwargs = kwargs or {}
        if not torch.compiler.is_dynamo_compiling() and private.inspects():
            # torch.compile inspects an argument of a compiled function, and needs the deferred tensor itself
            return unhandled(func, *args, **kwargs)
        if func in KNOWN:
            result = KNOWN[func](func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: real(logits, func), (args, kwargs))
        return func(*args, **kwargs)


# Between graphs it is not compiled by itself, nor what it calls: compiled, `unhandled` would call it without end.
private.skip_frames(DeferredLogits.__torch_function__)


class _DispatchedLogits(DeferredLogits):
    """Deferred logits outside of torch.compile, which cannot create tensors that have __torch_dispatch__."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch declares the disabled implementation
        cls, func: Function, types: Any, args: Any = (), kwargs: Any = None
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
        requested, (placement,) = placements[0], self.placements
        if requested == placement or (requested.is_shard(-1) and placement.is_shard()):
            return self
        return self._call(requested.is_replicate(), "redistribute", requested, device_mesh, placements, **kwargs)

    def to_local(self, **kwargs: Any) -> Any:
        """Record the conversion of gathered logits to a plain tensor; for logits in shards compute them."""
        return self._call(self._recipe.placement.is_replicate(), "to_local", None, **kwargs)

    def full_tensor(self, **kwargs: Any) -> Any:
        """Record a gather of the shards into a plain tensor."""
        return self._call(True, "full_tensor", None, **kwargs)

    def _call(self, known: bool, name: str, placement: Any, *args: Any, **kwargs: Any) -> Any:
        if known and is_open(self) and not kwargs.keys() - {"async_op"}:
            recorded: Recorded = methodcaller(name, *args, **kwargs), (self,), {}
            return derive(replace(self._recipe, placement=placement), recorded)
        return getattr(real(self, getattr(self, name)), name)(*args, **kwargs)


def defer(recipe: Recipe) -> DeferredLogits:
    """Return deferred logits."""
    sources = [each.source for each in recipe.origins if each.source.requires_grad]
    tracked = recipe.tracked and torch.is_grad_enabled()
    recipe = replace(recipe, tracked=tracked)
    if torch.compiler.is_compiling():
        logits = DeferredLogits(_memory(recipe.empty(), recipe.size, recipe.dtype))
    else:
        logits = _Edge.apply(recipe, *(dict.fromkeys(sources) if tracked else ()))
    logits._recipe, logits._real = recipe, None
    return logits


def derive(recipe: Recipe, recorded: Recorded, like: Tensor | None = None) -> DeferredLogits:
    """Return the deferred logits of a recorded call, with the shape, strides and dtype of `like`."""
    if like is not None:
        recipe = replace(recipe, size=tuple(like.shape), stride=like.stride(), dtype=like.dtype)
    return defer(replace(recipe, recorded=recorded, is_view=like is not None and like._base is not None))


def is_open(logits: object) -> TypeGuard[DeferredLogits]:
    """Whether these are deferred logits that were not computed, and to which no other autograd node is attached."""
    if not isinstance(logits, DeferredLogits) or logits._real is not None:
        return False
    if logits._recipe.is_view and not is_open(logits._recipe.recorded[1][0]):  # type: ignore[index]
        return False
    return logits._recipe.tracked or not logits.requires_grad


def real(logits: DeferredLogits, function: Function) -> Tensor:
    """Return the real logits, the same tensor each time. `function` is the function that reads them."""
    if logits._real is None:
        tracked, followed = logits._recipe.tracked, logits.requires_grad
        with _as_at_the_call(), torch.set_grad_enabled(tracked or followed):
            if tracked or not followed:
                logits._real = _read(logits, function, real)
            else:  # another Function returned them: continue at its node
                logits._real = unhandled(Tensor.clone, logits)
    return logits._real


def _values(logits: DeferredLogits, function: Function) -> Any:
    if logits._real is not None:
        return logits._real.detach()
    with torch.no_grad():
        return _read(logits, function, _values)


def _read(logits: DeferredLogits, function: Function, read: Callable[..., Tensor]) -> Any:
    """Compute logits, or the view of logits that `read` returns. Raise RuntimeError if the weights have changed."""
    recipe = logits._recipe
    if recipe.is_view:
        view, (base, *arguments), options = recipe.recorded  # type: ignore[misc]
        return view(read(base, function), *arguments, **options)
    check_unchanged(recipe.origins)
    note(recipe.call, "computed", looks(function))
    return recipe.hooked(_compute(recipe))


def _compute(recipe: Recipe) -> Any:
    """Compute logits with the operations that the model called, in their order and dtypes."""
    if recipe.recorded is None:
        logits: Any = run(recipe, partial(_product, recipe.origins))
        return logits.full_tensor() if recipe.in_shards and recipe.placement is None else logits
    function, args, kwargs = recipe.recorded
    args = tuple([_compute(each._recipe) if isinstance(each, DeferredLogits) else each for each in args])
    return function(*args, **kwargs)


def _product(origins: tuple[_Origin, ...], hidden: Any, weights: Any, bias: Any) -> Tensor:
    """Return a product. If the weight is a DTensor, so is the product, as in PyTorch's ColwiseParallel."""
    (hidden,), (weight,) = hidden, weights
    for record, gathered in zip(origins[1:], (weight, bias)):  # noqa: B905  # PyTorch 2.8 compiles strict=False as True
        if record.retained is None:  # freed by FSDP after the head's call: `check_unchanged` cannot look at it
            _compare(record, gathered)
    if in_shards(weight):
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


class _Edge(torch.autograd.Function):
    """(recipe, *its tensors) -> deferred logits; backward passes their gradient to the tensors."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *tensors: Tensor) -> Any:
        ctx.recipe, ctx.tensors = recipe, tensors
        logits = _memory(recipe.empty(), recipe.size, recipe.dtype)
        return logits.as_subclass(_DispatchedLogits if recipe.placement is None else _LogitsInShards)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        recipe = ctx.recipe
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
        again = torch.is_grad_enabled()  # True with create_graph=True
        with torch.enable_grad():
            logits = _compute(recipe)
        return None, *torch.autograd.grad(logits, ctx.tensors, gradient, create_graph=again)
