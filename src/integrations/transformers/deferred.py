"""Deferred logits: a tensor subclass whose values are computed only if something reads them.

A patched head returns `DeferredLogits` instead of the product. Calls that models make between head and loss (`steps`)
return other deferred logits, which keep the call. The loss (`loss`) is computed from the hidden states. Every other
operation gets real logits, the same that the unpatched model would have computed. Real logits are computed once and
kept, so that in-place writes, hooks and retained gradients behave as usual.

Three mechanisms intercept operations. `__torch_function__` sees all calls from Python. `__torch_dispatch__` sees calls
from C++ and from inside an autograd.Function. For the latter, a node in the autograd graph (`_Edge`) passes gradients
on to hidden states and weight.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from xent.backends.torch.private import saved_hooks
from xent.integrations.transformers.changes import change
from xent.integrations.transformers.history import looks, note
from xent.integrations.transformers.recipe import Recipe, gather, product

__all__ = [
    "KNOWN",
    "DeferredLogits",
    "blank",
    "check_unchanged",
    "defer",
    "derive",
    "getter",
    "identity",
    "is_open",
    "real",
]

KNOWN: dict[Any, tuple[Callable[..., Any], frozenset[str]]] = {}
"""Recorded functions: function -> recorder, and the keyword arguments that it takes. `steps` registers them."""


def getter(attribute: str) -> Any:
    """Return the function that `__torch_function__` receives when an attribute is read."""
    return getattr(Tensor, attribute).__get__


_ATTRIBUTES = "shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_meta is_quantized is_sparse"
_METHODS = "size dim ndimension numel nelement __len__ __hash__ is_floating_point is_complex"
_METADATA: dict[Any, None] = dict.fromkeys(
    [
        *[getter(name) for name in _ATTRIBUTES.split()],
        *[getattr(Tensor, name) for name in _METHODS.split()],
        *(torch.numel, torch.is_floating_point, torch.is_complex),
    ]
)
"""Functions and attributes that deferred logits answer without computing values."""

_LIBRARY = torch.library.Library("xent", "FRAGMENT")
_LIBRARY.define("blank(Tensor like, SymInt[] size, ScalarType dtype) -> Tensor")


def _blank(like: Tensor, size: list[int], dtype: torch.dtype) -> Tensor:
    return like.new_full((), torch.nan, dtype=dtype).expand(size)


_LIBRARY.impl("blank", _blank, "CompositeExplicitAutograd")
torch.library.register_fake("xent::blank", _blank, lib=_LIBRARY)


def blank(recipe: Recipe) -> Tensor:
    """Return the memory of deferred logits: a single NaN, expanded to their size.

    It is a custom operation because torch.compile would materialise an expanded tensor that a graph returns; the result
    of a custom operation is returned unchanged.
    """
    made: Tensor = torch.ops.xent.blank(recipe.tensors[0].detach(), recipe.size, recipe.dtype)
    return made


class DeferredLogits(torch.Tensor):
    """Logits (..., V) of a language model that are computed when something reads them. Only `defer` creates them.

    Shape, dtype and device are known without computing anything.
    """

    _recipe: Recipe
    _tracked: bool
    """Whether autograd records them: gradients were enabled, and some of the tensors requires a gradient."""
    _real: Tensor | None
    _hooks: Any
    """The saved-tensor hooks that were active when these logits were deferred."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from shape, dtype and device, or record the call, or execute it with real logits."""
        kwargs = {} if kwargs is None else kwargs
        if func in _METADATA or _is_described():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in KNOWN and all(name in KNOWN[func][1] for name in kwargs):
            made = KNOWN[func][0](func, *args, **kwargs)
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
    """Deferred logits that replace a DTensor, with the attributes of a DTensor."""

    @property
    def device_mesh(self) -> Any:
        """The mesh of the weight."""
        return self._recipe.products[0].weight.device_mesh  # type: ignore[attr-defined]

    @property
    def placements(self) -> Any:
        """The placements of the DTensor that the unpatched head would return."""
        from torch.distributed.tensor import Replicate, Shard

        return (Replicate() if self._recipe.gathered else Shard(len(self._recipe.size) - 1),)

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> Any:
        """Record a gather of the shards, or nothing if the placements stay the same."""
        known = device_mesh in (None, self.device_mesh) and not kwargs.keys() - {"async_op"}
        if is_open(self) and known and placements and len(placements) == 1:
            gathers, gathered = placements[0].is_replicate(), self._recipe.gathered
            if gathers and not gathered:
                return derive(replace(self._recipe, gathered=True), (gather, (self,), {}))
            if gathers or (not gathered and any(placements[0].is_shard(axis) for axis in (-1, self.ndim - 1))):
                return self
        return self._computed("redistribute")(device_mesh, placements, **kwargs)

    def to_local(self, **kwargs: Any) -> Any:
        """Record the conversion of gathered logits to a plain tensor; for logits in shards compute them."""
        if is_open(self) and not kwargs and self._recipe.gathered:
            return derive(replace(self._recipe, local=True), (methodcaller("to_local"), (self,), {}))
        return self._computed("to_local")(**kwargs)

    def full_tensor(self, **kwargs: Any) -> Any:
        """Record a gather of the shards into a plain tensor."""
        from torch.distributed.tensor import Replicate

        if is_open(self) and not kwargs:
            return self.redistribute(placements=[Replicate()]).to_local()
        return self._computed("full_tensor")(**kwargs)

    def _computed(self, name: str) -> Any:
        return getattr(real(self, getattr(self, name)), name)

    def __getattr__(self, name: str) -> Any:
        """Return the parts of a DTensor's implementation."""
        if name in ("_spec", "_local_tensor"):
            return self._computed(name)
        raise AttributeError(f"deferred logits have no attribute {name!r}")


def defer(recipe: Recipe) -> DeferredLogits:
    """Return deferred logits."""
    compiling = torch.compiler.is_compiling()
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in recipe.tensors)
    if not tracked:
        recipe = replace(recipe, tensors=tuple([tensor.detach() for tensor in recipe.tensors]))
    logits = DeferredLogits(blank(recipe)) if compiling else _Edge.apply(recipe, *recipe.tensors)
    logits._recipe, logits._tracked, logits._real = recipe, tracked, None
    logits._hooks = None if compiling else saved_hooks(True)
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
    return logits._tracked or not logits.requires_grad


def real(logits: DeferredLogits, function: Any) -> Tensor:
    """Return the real logits, the same tensor each time. `function` is the function that reads them."""
    if logits._real is None:
        with _as_at_the_call(logits):
            with torch.set_grad_enabled(logits._tracked):
                made = _read(logits, function, real)
                if not logits._recipe.is_view:
                    made = logits._recipe.hooked(made)
            if logits.requires_grad and not logits._tracked:
                made = _Adopted.apply(logits, made)
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
    check_unchanged(recipe)
    reason = looks(function)
    for call in recipe.calls:
        note(call, computed=reason)
    return _compute(recipe)


def _compute(recipe: Recipe) -> Tensor:
    """Compute logits with the operations that the model called, in their order and dtypes."""
    if recipe.made is None:
        return product(recipe)
    function, args, kwargs = recipe.made
    args = tuple([_compute(each._recipe) if isinstance(each, DeferredLogits) else each for each in args])
    computed: Tensor = function(*args, **kwargs)
    return computed


@contextmanager
def _as_at_the_call(logits: DeferredLogits) -> Iterator[None]:
    """Leave inference mode and checkpoints that were entered after the head was called.

    The logits are kept for later reads. Tensors made in inference mode cannot be used by autograd later. A checkpoint
    with use_reentrant=False would find kept logits when it computes its region again, and save fewer tensors.
    """
    if torch.compiler.is_compiling():
        yield
        return
    leaves = torch.is_inference_mode_enabled() and not any(each.is_inference() for each in logits._recipe.tensors)
    inside = torch.inference_mode(False) if leaves else nullcontext()
    hooks = nullcontext() if saved_hooks(True) == logits._hooks else saved_tensors_hooks(identity, identity)
    with inside, hooks:
        yield


def identity(tensor: Tensor) -> Tensor:
    """Return the tensor."""
    return tensor


def _is_described() -> bool:
    """Whether torch.compile inspects an argument of a compiled function, which needs the deferred tensor itself."""
    return not torch.compiler.is_dynamo_compiling() and TracingContext.try_get() is not None


def check_unchanged(recipe: Recipe, looked_at: bool = True) -> None:
    """Raise RuntimeError if computing the logits would no longer give those of the unpatched model.

    Elements of weights are compared, which synchronises with the device, only if the logits are `looked_at`.
    """
    if torch.compiler.is_compiling():
        return
    looked_at = looked_at and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    for origin in recipe.origins:
        happened = change(origin, looked_at)
        if happened is not None:
            raise RuntimeError(
                f"these logits were never computed, and cannot be computed now: {happened} after the model was called. "
                "Read them before that, for example with outputs.logits.detach(). With FSDP2, keep the outermost group "
                "unsharded after forward: fully_shard(model, reshard_after_forward=False). Or restore the model's own "
                "head with xent.integrations.transformers.unpatch(model)"
            )


class _Edge(torch.autograd.Function):
    """(recipe, *its tensors) -> deferred logits; backward passes their gradient to the tensors."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *tensors: Tensor) -> Tensor:
        ctx.recipe, ctx.tensors = recipe, tensors
        ctx.set_materialize_grads(False)
        sharded = recipe.in_shards and not recipe.local
        return blank(recipe).as_subclass(_LogitsInShards if sharded else _DispatchedLogits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        recipe, wanted = ctx.recipe, ctx.needs_input_grad[1:]
        if gradient is None:
            return None, *[None for _ in wanted]
        check_unchanged(recipe)
        for hook in recipe.hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if recipe.caller is not None:
            raise RuntimeError(
                "the logits of a patched model reached an operation that xent cannot follow, and their gradient needs "
                "the head's weight, which is gathered only during its calls (ZeRO-3, FSDP1, an FSDP2 group of its "
                "own): shard the head with the rest of the model, or call "
                "xent.integrations.transformers.unpatch(model)"
            )
        asked = {id(tensor): tensor for tensor, asks in zip(ctx.tensors, wanted, strict=True) if asks}
        again = torch.is_grad_enabled()  # True with create_graph=True
        with torch.enable_grad():
            logits = _compute(recipe)
        found = torch.autograd.grad(logits, list(asked.values()), gradient, create_graph=again)
        made = dict(zip(asked, found, strict=True))
        return None, *[made.pop(id(tensor), None) for tensor in ctx.tensors]


class _Adopted(torch.autograd.Function):
    """(deferred logits that another Function returned, their values) -> the values, with that Function's node."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
