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
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from xent.backends.torch.private import saved_hooks
from xent.integrations.transformers.attributes import METADATA
from xent.integrations.transformers.blank import blank
from xent.integrations.transformers.changes import Origin, change
from xent.integrations.transformers.history import note_compiled
from xent.integrations.transformers.recipe import Recipe, product

__all__ = ["KNOWN", "LAYOUT", "DeferredLogits", "check_unchanged", "defer", "derive", "is_open", "metadata", "real"]

KNOWN: dict[Any, tuple[Callable[..., Any], frozenset[str]]] = {}
"""Recorded functions: function -> recorder, and the keyword arguments that it takes. `steps` registers them."""
LAYOUT: dict[str, Callable[..., Any]] = {}
"""Attributes that only DTensors have: attribute -> function that answers or records it. `parallel` registers them."""


class DeferredLogits(torch.Tensor):
    """Logits (..., V) of a language model that are computed when something reads them. Only `defer` creates them.

    Shape, dtype and device are known without computing anything.
    """

    _recipe: Recipe
    _made: Any
    """(function, args, kwargs) of the recorded call that made these logits; None if a head did."""
    _aliases: bool
    """Whether they are a view of the logits in that call."""
    _tensors: tuple[Tensor, ...]
    """The hidden states, weights and constants from which they are computed."""
    _tracked: bool
    """Whether autograd records that: gradients were enabled, and some of the tensors requires a gradient."""
    _origins: tuple[Origin, ...]
    """The state of the tensors when the head was called."""
    _real: Tensor | None
    _hooks: Any
    """The saved-tensor hooks that were active when these logits were deferred."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from shape, dtype and device, or record the call, or execute it with real logits."""
        kwargs = {} if kwargs is None else kwargs
        if func in METADATA or _is_described():
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
    """Deferred logits that replace a DTensor."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only DTensors have."""
        if name in LAYOUT:
            return LAYOUT[name](self)
        if name in ("_spec", "_local_tensor"):
            return getattr(real(self, name), name)
        raise AttributeError(f"deferred logits have no attribute {name!r}")


def defer(
    recipe: Recipe,
    tensors: tuple[Tensor, ...],
    origins: tuple[Origin, ...],
    made: tuple[Any, ...] | None = None,
    is_view: bool = False,
) -> DeferredLogits:
    """Return deferred logits, to be computed by the recorded call, or by a head."""
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    tensors = tensors if tracked else tuple([tensor.detach() for tensor in tensors])
    compiling, size = torch.compiler.is_compiling(), (*recipe.products[0].hidden.shape[:-1], recipe.classes)
    logits = (
        DeferredLogits(blank(tensors[0], size, recipe.dtype))
        if compiling
        else _Edge.apply(recipe, origins, made, size, *tensors)
    )
    logits._recipe, logits._made, logits._aliases, logits._tensors = recipe, made, is_view, tensors
    logits._tracked, logits._origins, logits._real = tracked, origins, None
    logits._hooks = None if compiling else saved_hooks(True)
    return logits


def derive(
    logits: DeferredLogits,
    recipe: Recipe,
    made: tuple[Any, ...],
    tensors: tuple[Tensor, ...] = (),
    origins: tuple[Origin, ...] = (),
    is_view: bool = False,
) -> DeferredLogits:
    """Return the deferred logits that a recorded call makes of these, and of more tensors."""
    return defer(recipe, (*logits._tensors, *tensors), (*logits._origins, *origins), made, is_view)


def metadata(logits: DeferredLogits, name: str) -> Any:
    """Return an attribute of the deferred tensor itself, without `__torch_function__`."""
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(logits, name)


def is_open(logits: Any) -> bool:
    """Whether these are deferred logits that were not computed, and to which no other autograd node is attached."""
    if not isinstance(logits, DeferredLogits) or logits._real is not None:
        return False
    if logits._aliases and not is_open(logits._made[1][0]):
        return False
    return logits._tracked or not metadata(logits, "requires_grad")


def real(logits: DeferredLogits, function: Any) -> Tensor:
    """Return the real logits, the same tensor each time. `function` is the function that reads them."""
    if logits._real is None:
        with _as_at_the_call(logits):
            with torch.set_grad_enabled(logits._tracked):
                if logits._aliases:
                    view, (base, *arguments), options = logits._made
                    made: Tensor = view(real(base, function), *arguments, **options)
                else:
                    _prepare_to_compute(logits, function)
                    made = logits._recipe.hooked(_compute(logits._recipe, logits._made))
            if metadata(logits, "requires_grad") and not logits._tracked:
                made = _Adopted.apply(logits, made)
        logits._real = made
    return logits._real


@contextmanager
def _as_at_the_call(logits: DeferredLogits) -> Iterator[None]:
    """Leave inference mode and checkpoints that were entered after the head was called.

    The logits are kept for later reads. Tensors made in inference mode cannot be used by autograd later. A checkpoint
    with use_reentrant=False would find kept logits when it computes its region again, and save fewer tensors.
    """
    if torch.compiler.is_compiling():
        yield
        return
    leaves = torch.is_inference_mode_enabled() and not any(each.is_inference() for each in logits._tensors)
    inside = torch.inference_mode(False) if leaves else nullcontext()
    hooks = nullcontext() if saved_hooks(True) == logits._hooks else saved_tensors_hooks(_unchanged, _unchanged)
    with inside, hooks:
        yield


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _is_described() -> bool:
    """Whether torch.compile inspects an argument of a compiled function, which needs the deferred tensor itself."""
    return not torch.compiler.is_dynamo_compiling() and TracingContext.try_get() is not None


def _compute(recipe: Recipe, made: tuple[Any, ...] | None) -> Tensor:
    """Compute logits with the operations that the model called, in their order and dtypes."""
    if made is None:
        return product(recipe)
    function, args, kwargs = made
    args = tuple([_compute(each._recipe, each._made) if isinstance(each, DeferredLogits) else each for each in args])
    computed: Tensor = function(*args, **kwargs)
    return computed


def _values(logits: DeferredLogits, function: Any) -> Tensor:
    if logits._real is not None:
        return logits._real.detach()
    if logits._aliases:
        view, (base, *arguments), options = logits._made
        viewed: Tensor = view(_values(base, function), *arguments, **options)
        return viewed
    _prepare_to_compute(logits, function)
    with torch.no_grad():
        return _compute(logits._recipe, logits._made)


def _prepare_to_compute(logits: DeferredLogits, function: Any) -> None:
    """Record which function reads the logits. Raise RuntimeError if the weights have changed since."""
    if torch.compiler.is_compiling():
        for origin in logits._origins:
            note_compiled(origin.key, logits._tracked, None, "what is compiled looks at them")
        return
    check_unchanged(logits._origins)
    for origin in logits._origins:
        if origin.call is not None:
            origin.call.note_look(function)


def check_unchanged(origins: tuple[Origin, ...], looked_at: bool = True) -> None:
    """Raise RuntimeError if computing them would no longer give the logits of the unpatched model.

    Elements of weights are compared, which synchronises with the device, only if the logits are `looked_at`.
    """
    if torch.compiler.is_compiling():
        return
    looked_at = looked_at and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    for origin in origins:
        happened = change(origin, looked_at)
        if happened is not None:
            raise RuntimeError(
                f"these logits were never computed, and cannot be computed now: {happened} after the model was called. "
                "Read them before that, for example with outputs.logits.detach(). With FSDP2, keep the outermost group "
                "unsharded after forward: fully_shard(model, reshard_after_forward=False). Or restore the model's own "
                "head with xent.integrations.transformers.unpatch(model)"
            )


class _Edge(torch.autograd.Function):
    """(recipe, origins, made, size, *tensors) -> deferred logits; backward passes their gradient to the tensors."""

    @staticmethod
    def forward(
        ctx: Any, recipe: Recipe, origins: tuple[Origin, ...], made: Any, size: tuple[int, ...], *tensors: Tensor
    ) -> Tensor:
        ctx.recipe, ctx.origins, ctx.made, ctx.tensors = recipe, origins, made, tensors
        ctx.set_materialize_grads(False)
        sharded = recipe.in_shards and not recipe.local
        return blank(tensors[0], size, recipe.dtype).as_subclass(_LogitsInShards if sharded else _DispatchedLogits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[4:]
        if gradient is None:
            return None, None, None, None, *[None for _ in wanted]
        check_unchanged(ctx.origins)
        for hook in ctx.recipe.hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if ctx.recipe.caller is not None:
            raise RuntimeError(
                "the logits of a patched model reached an operation that xent cannot follow, and their gradient needs "
                "the head's weight, which is gathered only during its calls (ZeRO-3, FSDP1, an FSDP2 group of its "
                "own): shard the head with the rest of the model, or call "
                "xent.integrations.transformers.unpatch(model)"
            )
        asked = {id(tensor): tensor for tensor, asks in zip(ctx.tensors, wanted, strict=True) if asks}
        again = torch.is_grad_enabled()  # True with create_graph=True
        with torch.enable_grad():
            logits = _compute(ctx.recipe, ctx.made)
        found = torch.autograd.grad(logits, list(asked.values()), gradient, create_graph=again)
        made = dict(zip(asked, found, strict=True))
        return None, None, None, None, *[made.pop(id(tensor), None) for tensor in ctx.tensors]


class _Adopted(torch.autograd.Function):
    """(deferred logits that another Function returned, their values) -> the values, with that Function's node."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
