"""Heads that defer their logits: a subclass of torch.nn.Linear, and the search for a model's heads."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from xent.integrations.transformers import parallel
from xent.integrations.transformers import steps as _steps  # noqa: F401  registers the recorded calls
from xent.integrations.transformers.changes import origin, unwatch, watch
from xent.integrations.transformers.deferred import defer
from xent.integrations.transformers.history import begin_call, modules_around, note_compiled
from xent.integrations.transformers.recipe import Caller, Product, Recipe, autocast_dtype
from xent.integrations.transformers.replaced import inner
from xent.integrations.transformers.unfit import advice

__all__ = ["COMPILES", "DeferringHead", "DeferringLinear", "defer_logits", "find_heads", "find_owner", "restore"]

COMPILES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
"""Whether this PyTorch's torch.compile supports deferred logits. If not, compiled graphs compute real logits."""

_PLAIN = (Tensor, nn.Parameter)


class DeferringHead:
    """Mixin that makes a subclass of torch.nn.Linear defer its logits. It is the first base of the class."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Call the head, but without DeepSpeed's hooks, which gather a weight, if logits are deferred."""
        if len(args) == 1 and hasattr(self._parameters.get("weight"), "ds_id") and "_xent_task" not in vars(self):
            return _logits(self, args[0])
        made: Tensor = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return made

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return deferred logits if possible, otherwise logits. With a task, return task(input, weight, bias)."""
        task = vars(self).get("_xent_task")
        if task is not None:
            made: Tensor = task(input, self.weight, self.bias)
            return made
        if "parametrizations" in self._modules:
            with parametrize.cached():  # otherwise each look at the weight computes it
                return _logits(self, input)
        return _logits(self, input)


class DeferringLinear(DeferringHead, nn.Linear):
    """torch.nn.Linear that returns deferred logits."""


def _logits(head: Any, input: Tensor) -> Tensor:
    """See `DeferringHead.forward`, which transformers may call with a head of another class."""
    if parallel.is_running(head):
        return parallel.compute(head, input)
    compiling, key = torch.compiler.is_compiling(), 0
    call = None if compiling else begin_call(head)
    why = _why_computed(head, input)
    if compiling:
        history = getattr(head, "_xent_history", None)
        key = 0 if history is None else history.key
        if not torch.compiler.is_exporting():
            note_compiled(key, head.training and torch.is_grad_enabled(), None, why, True)
    elif call is not None and why is not None:
        call.note_computed(why)
    caller = _caller(head)
    if why is not None:
        if hasattr(head.weight, "ds_id") and caller is not None:
            return caller(input, F.linear)
        return parallel.compute(head, input)
    input = parallel.whole(input)
    if not compiling:
        watch(head)
        if input.is_inference():
            input = input.clone()  # no version counter would count a write to it
    autocast = autocast_dtype(input.device.type)
    weights = (head.weight,) if head.bias is None else (head.weight, head.bias)
    classes, gathers = getattr(head.weight, "ds_shape", head.weight.shape)[0], parallel.gathered(head)
    recipe = Recipe(
        (Product(input, head.weight),),
        head.bias,
        classes,
        autocast or input.dtype,
        autocast,
        caller,
        gathered=gathers,
        local=gathers,
    )
    state = origin((input,), weights, head, caller is not None, call, key)
    return defer(recipe, (input, *weights), (state,))


def _why_computed(head: Any, input: Tensor) -> str | None:
    """Return why this call must compute its logits, or None if it can defer them.

    Logits are deferred for plain tensors, if no hook needs the head's output. Without gradients they are not deferred
    for a single position, which means generation, nor under torch.compile: there, inference mode, in which tensors have
    no version counter, cannot be detected.
    """
    compiling, weight, bias = torch.compiler.is_compiling(), head.weight, head.bias
    if not compiling and (torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()):  # type: ignore[attr-defined]
        return "torch.jit or torch.func traces the model"
    if getattr(head, "_xent_restored", False):
        return "the head was given back with unpatch(model)"
    if not torch.is_grad_enabled() and (input.ndim < 2 or input.shape[-2] == 1):
        return "there is one position, as in generation"
    if not compiling and parallel.is_of_plan(vars(head).get("forward")):
        return "transformers made the head tensor-parallel after patch(model): call patch(model) after that"
    why = parallel.why_computed(head, input)
    if why is not None:
        return why
    if parallel.in_shards(weight):
        if _is_sharded(head) and not _shares_group(head):
            return "FSDP2 shards the tensor-parallel head on its own: let it belong to the group of the whole model"
    else:
        for tensor, name in ((input, "hidden states"), (weight, "weight")):
            if type(tensor) not in _PLAIN:
                return f"the head's {name} are a {type(tensor).__name__}"
    hooks = [str(getattr(inner(hook), "__module__", "")) for hook in head._forward_hooks.values()]
    if not all(module.startswith(("torch.distributed.", "deepspeed.")) for module in hooks):
        return "the head has a forward hook, which is given its logits"
    if _is_taken_away(head):
        return "the head's weight is taken away after its call (reshard_after_forward=True of a group with others)"
    if not input.is_floating_point() or input.ndim < 1 or input.device != weight.device or input.device.type == "meta":
        return f"the head's hidden states are {input.dtype} on {input.device}, its weight is on {weight.device}"
    dtypes = [tensor.dtype for tensor in (input, weight, bias) if tensor is not None]
    if autocast_dtype(input.device.type) is None:
        if len(set(dtypes)) > 1:
            return f"hidden states, weight and bias of the head differ in dtype: {dtypes}"
    elif torch.float64 in dtypes:
        return "the head computes in float64 under autocast"
    if compiling and not COMPILES:
        return "torch.compile defers logits from PyTorch 2.13 on"
    if compiling and (not torch.is_grad_enabled() or torch.compiler.is_exporting()):
        return "the model is exported, or compiled without gradients"
    return None


def _caller(head: Any) -> Caller | None:
    """Return what calls the head so that its weight is gathered, if it is gathered only for that."""
    if torch.compiler.is_compiling():
        return None
    if hasattr(head.weight, "ds_id") or (_is_sharded(head) and not _shares_group(head)):
        return Caller(head, head)
    wrappers = modules_around(head) if _is_flat(head) else ()
    found = [module for module in wrappers if getattr(module, "_fsdp_wrapped_module", None) is head]
    return Caller(head, found[0]) if found else None


def _is_sharded(head: Any) -> bool:
    """Whether `fully_shard` was applied to this module: FSDP2 then has hooks on it, which gather its weight."""
    return hasattr(head, "_get_fsdp_state")


def _shares_group(head: Any) -> bool:
    """Whether this module is in an FSDP2 group with others, so that it cannot be called again separately."""
    return len(head._get_fsdp_state()._modules) > 1


def _is_flat(head: Any) -> bool:
    """Whether FSDP1 wraps this module alone, and so reshards its weight at the end of its call."""
    parts = () if isinstance(head.weight, nn.Parameter) else getattr(head.weight._base, "_param_infos", ())
    return bool(parts) and all(part.module is head for part in parts)


def _is_taken_away(head: Any) -> bool:
    """Whether the weight is resharded after this call, and the head cannot be called again to gather it."""
    if _is_sharded(head):
        return _shares_group(head) and bool(head._get_fsdp_state()._fsdp_param_group._reshard_after_forward)
    return _is_flat(head) and _caller(head) is None


def find_owner(model: nn.Module) -> Any:
    """Return the transformers or PEFT model inside of wrappers; raise ValueError if there is none."""
    owner: Any = model
    while not hasattr(owner, "get_output_embeddings") and isinstance(getattr(owner, "module", None), nn.Module):
        owner = owner.module  # a wrapper such as DistributedDataParallel
    if not hasattr(owner, "get_output_embeddings"):
        raise ValueError(
            f"model must be a transformers model with a language-model head, got {type(model).__name__}, which has no "
            "get_output_embeddings(); for other models call xent.linear_cross_entropy instead of head and loss"
        )
    return owner


def find_heads(owner: Any) -> list[nn.Module]:
    """Return the linear layers that compute the model's logits; raise ValueError if there are none.

    With PEFT there may be several: the head, trained copies of it, and the low-rank weights of LoRA.
    """
    head = owner.get_output_embeddings()
    found = [] if head is None else [module for module in head.modules() if _is_linear(module)]
    if found:
        classes = max(module.out_features for module in found)
        found = [module for module in found if module.out_features == classes]
    if not found:
        raise ValueError(
            f"the head of {type(owner).__name__} cannot be patched: get_output_embeddings() is "
            f"{'None' if head is None else type(head).__name__}, and it must be, or hold, a torch.nn.Linear with the "
            f"forward of its class; the model was left as it was. {advice(owner)}"
        )
    return found


def _is_linear(module: Any) -> bool:
    forward = type(module).forward
    given = vars(module).get("forward")
    if given is not None and not issubclass(type(module), DeferringHead) and not parallel.is_of_plan(given):
        forward = getattr(vars(module).get("_old_forward"), "__func__", None)
    return isinstance(module, nn.Linear) and forward in (nn.Linear.forward, DeferringHead.forward)


def defer_logits(head: Any) -> bool:
    """Make a head defer its logits; return whether this changed the head."""
    watch(head)
    parallel.take_over(head)
    changed = not issubclass(type(head), DeferringHead) or hasattr(head, "_xent_restored")
    head.__class__ = _deferring(type(head))
    if hasattr(head, "_xent_restored"):
        del head._xent_restored
    _rebind(head)
    return changed


def _deferring(kind: type) -> Any:
    """Return the subclass of `kind` that defers its logits; `kind` itself if it already does."""
    if issubclass(kind, DeferringHead):
        return kind
    if kind not in _CLASSES:
        _CLASSES[kind] = _make_deferring(kind)
    return _CLASSES[kind]


_CLASSES: dict[type, Any] = {nn.Linear: DeferringLinear}


def _make_deferring(kind: type) -> Any:
    def reduce(self: Any, protocol: Any) -> Any:
        """Pickle with the original class, because the generated class cannot be imported."""
        _, _, *state = super(made, self).__reduce_ex__(protocol)
        return _new, (kind,), *state

    members = {"_xent_restores": kind, "__reduce_ex__": reduce}
    made: Any = type(f"Deferring{kind.__name__}", (DeferringHead, kind), members)
    return made


def _new(kind: type) -> Any:
    """Return an empty head for unpickling: an instance of the deferring subclass of `kind`."""
    made = _deferring(kind)
    return made.__new__(made)


def restore(head: Any) -> None:
    """Make a head compute its logits again."""
    kind = type(head)
    unwatch(head)
    parallel.give_back(head)
    if kind is DeferringLinear:
        head.__class__ = nn.Linear
    elif "_xent_restores" in vars(kind):
        head.__class__ = kind._xent_restores
    elif issubclass(kind, DeferringHead):
        head._xent_restored = True  # another library's subclass of DeferringLinear: its class cannot be restored
    _rebind(head)


def _rebind(head: Any) -> None:
    """Update `_old_forward`, the forward that accelerate's hooks call, to that of the head's present class."""
    if "_old_forward" in vars(head):
        head._old_forward = type(head).forward.__get__(head)
