"""Heads that defer their logits: a subclass of torch.nn.Linear, and the search for a model's heads.

The weight of a tensor-parallel head is a DTensor. PyTorch's ColwiseParallel adds two hooks to the head: one converts
hidden states to DTensors, one redistributes the logits. The hooks stay, and deferred logits record the redistribution.
The plans of transformers instead replace the head's forward by one that does both. `patch` removes that forward; it is
called only if logits are computed.
"""

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from xent.integrations.transformers import steps as _steps  # noqa: F401  registers the recorded calls
from xent.integrations.transformers.changes import origin, unwatch, watch
from xent.integrations.transformers.deferred import defer
from xent.integrations.transformers.history import begin_call, inner, modules_around
from xent.integrations.transformers.recipe import Caller, Product, Recipe, autocast_dtype

__all__ = ["DeferringHead", "defer_logits", "find_heads", "find_owner", "restore"]


class DeferringHead:
    """Mixin that makes a subclass of torch.nn.Linear defer its logits, while it has a history.

    It is the first base of the class.
    """

    _xent_kind: type
    """The class without this mixin."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Call the head, but without DeepSpeed's hooks, which gather a weight, if logits are deferred."""
        partitioned = len(args) == 1 and hasattr(self._parameters.get("weight"), "ds_id")
        if partitioned and hasattr(self, "_xent_history") and not hasattr(self, "_xent_task"):
            return _logits(self, args[0])
        made: Tensor = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return made

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return deferred logits if possible, otherwise logits. With a task, return task(input, weight, bias)."""
        task = getattr(self, "_xent_task", None)
        if task is not None:
            made: Tensor = task(input, self.weight, self.bias)
            return made
        if "parametrizations" in self._modules:
            with parametrize.cached():  # otherwise each look at the weight computes it
                return _logits(self, input)
        return _logits(self, input)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle with the original class, because the class of the head cannot be imported."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, (self._xent_kind,), *reduced[2:]


@functools.cache
def _deferring(kind: type) -> Any:
    """Return the subclass of `kind` that defers its logits."""
    return type(f"Deferring{kind.__name__}", (DeferringHead, kind), {"_xent_kind": kind})


def _new(kind: type) -> Any:
    """Return an empty head for unpickling."""
    made = _deferring(kind)
    return made.__new__(made)


def _logits(head: Any, input: Tensor) -> Tensor:
    """See `DeferringHead.forward`."""
    history, compiling = getattr(head, "_xent_history", None), torch.compiler.is_compiling()
    if history is None:
        return F.linear(input, head.weight, head.bias)
    why = _why_computed(head, input)
    call: Any = None
    if not _is_exporting():
        call = begin_call(history.key, head.training and torch.is_grad_enabled(), compiling, why)
    plan = getattr(head, "_xent_plan", None)
    if why is not None:
        around = head if hasattr(head.weight, "ds_id") else plan
        return F.linear(input, head.weight, head.bias) if around is None else Caller(head, around)(input, F.linear)
    if _in_shards(input):  # its gradient is summed over ranks
        input = input.to_local(grad_placements=input.placements)  # type: ignore[attr-defined]
    if not compiling:
        watch(head)
        if input.is_inference():
            input = input.clone()  # no version counter would count a write to it
    caller, autocast = _caller(head), autocast_dtype(input.device.type)
    weights = (head.weight,) if head.bias is None else (head.weight, head.bias)
    gathers = plan is not None and _in_shards(head.weight)
    size = (*input.shape[:-1], getattr(head.weight, "ds_shape", head.weight.shape)[0])
    return defer(
        Recipe(
            (Product(input, head.weight),),
            head.bias,
            (input, *weights),
            (
                origin("hidden states", input),
                *[origin("weights", each, head, caller is not None) for each in weights],
            ),
            (call,),
            size,
            torch.empty(size, device="meta").stride(),
            autocast or input.dtype,
            autocast,
            caller,
            gathered=gathers,
            local=gathers,
        )
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_exporting() -> bool:
    """Whether torch.export traces the model. Before PyTorch 2.13 Dynamo replaces the same call by True."""
    return torch.compiler.is_exporting()


def _why_computed(head: Any, input: Any) -> str | None:
    """Return why this call must compute its logits, or None if it can defer them.

    Logits are deferred for plain tensors, if no hook needs the head's output. Without gradients they are not deferred
    for a single position, which means generation, nor under torch.compile: there, inference mode, in which tensors have
    no version counter, cannot be detected.
    """
    compiling, weight, bias = torch.compiler.is_compiling(), head.weight, head.bias
    if not compiling and (torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()):  # type: ignore[attr-defined]
        return "torch.jit or torch.func traces the model"
    if not torch.is_grad_enabled() and (input.ndim < 2 or input.shape[-2] == 1):
        return "there is one position, as in generation"
    if not compiling and _is_of_plan(vars(head).get("forward")):
        return "transformers made the head tensor-parallel after patch(model): call patch(model) after that"
    style = _style(getattr(head, "_xent_plan", None))
    if style is not None:
        return (
            f"its tensor-parallel plan gives the head transformers' {style}, and logits are deferred for "
            '"colwise_gather_output" and "replicate"'
        )
    if _in_shards(weight):
        why = _why_computed_in_shards(head, input)
        if why is not None:
            return why
    else:
        for tensor, name in ((input, "hidden states"), (weight, "weight")):
            if type(tensor) not in (Tensor, nn.Parameter):
                return f"the head's {name} are a {type(tensor).__name__}"
    hooks = [str(getattr(inner(hook), "__module__", "")) for hook in head._forward_hooks.values()]
    if not all(module.startswith(("torch.distributed.", "deepspeed.")) for module in hooks):
        return "the head has a forward hook, which is given its logits"
    if _is_flat(head) and _caller(head) is None:
        return "FSDP1 gathers the head's weight only during its call, and patch(model) was not called with its wrapper"
    if not input.is_floating_point() or input.ndim < 1 or input.device != weight.device or input.device.type == "meta":
        return f"the head's hidden states are {input.dtype} on {input.device}, its weight is on {weight.device}"
    dtypes = [tensor.dtype for tensor in (input, weight, bias) if tensor is not None]
    if autocast_dtype(input.device.type) is None:
        if len(set(dtypes)) > 1:
            return f"hidden states, weight and bias of the head differ in dtype: {dtypes}"
    elif torch.float64 in dtypes:
        return "the head computes in float64 under autocast"
    if compiling and (not torch.is_grad_enabled() or _is_exporting()):
        return "the model is exported, or compiled without gradients"
    return None


def _why_computed_in_shards(head: Any, input: Any) -> str | None:
    """Return why a head whose weight is a DTensor cannot defer its logits, or None."""
    if torch.compiler.is_compiling():
        return "torch.compile defers no logits with classes in shards"
    mesh, placements = head.weight.device_mesh, tuple(head.weight.placements)
    if mesh.ndim > 1 or not placements[0].is_shard(0):
        return f"the head's weight has placements {placements}, and they must be (Shard(dim=0),) when it is called"
    if head.bias is not None and tuple(getattr(head.bias, "placements", ())) != placements:
        return "the head's bias has other placements than its weight"
    if _in_shards(input) and (input.device_mesh != mesh or not _is_replicated(*input.placements)):
        return f"the head's hidden states have placements {input.placements} on {input.device_mesh}"
    if hasattr(head, "_get_fsdp_state") and len(head._get_fsdp_state()._modules) == 1:
        return "FSDP2 shards the tensor-parallel head on its own: let it belong to the group of the whole model"
    return None


def _in_shards(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "placements")


def _is_replicated(*placements: Any) -> bool:
    return all(placement is not None and placement.is_replicate() for placement in placements)


def _is_of_plan(forward: Any) -> bool:
    """Whether a forward was installed by transformers' tensor parallelism."""
    module, name = getattr(forward, "__module__", None), getattr(forward, "__qualname__", "")
    return str(module).startswith("transformers.") and name.endswith("install_forward.<locals>.tp_forward")


def _style(plan: Any) -> str | None:
    """Return the name of the style of transformers that made this forward, if its logits cannot be deferred."""
    style = None if plan is None else inspect.getclosurevars(plan).nonlocals.get("self")
    name = type(style).__name__
    gathers = (
        name == "ColwiseParallel"
        and _is_replicated(getattr(style, "input_layouts", None), getattr(style, "output_layouts", None))
        and getattr(style, "use_local_output", False)
    )
    changes_nothing = plan is None or name == "TensorParallelLayer"  # the base class
    return None if changes_nothing or gathers else name


def _caller(head: Any) -> Caller | None:
    """Return what calls the head so that its weight is gathered, if it is gathered only for that."""
    if torch.compiler.is_compiling():
        return None
    if hasattr(head.weight, "ds_id"):
        return Caller(head, head)
    if hasattr(head, "_get_fsdp_state"):  # `fully_shard` was applied to the head, alone or with other modules
        group = head._get_fsdp_state()._fsdp_param_group
        resharded = getattr(group, "_reshard_after_forward", False)
        return Caller(head, functools.partial(_gathered, head)) if resharded else None
    wrappers = modules_around(head) if _is_flat(head) else ()
    found = [module for module in wrappers if getattr(module, "_fsdp_wrapped_module", None) is head]
    return Caller(head, found[0]) if found else None


def _gathered(head: Any, input: Tensor) -> Tensor:
    """Return the result of the head's forward, with the weights of its FSDP2 group."""
    head.unshard()
    try:
        made: Tensor = head.forward(input)
    finally:
        head.reshard()
    return made


def _is_flat(head: Any) -> bool:
    """Whether FSDP1 wraps this module alone, and so reshards its weight at the end of its call."""
    parts = () if isinstance(head.weight, nn.Parameter) else getattr(head.weight._base, "_param_infos", ())
    return bool(parts) and all(part.module is head for part in parts)


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
    found: list[Any] = [] if head is None else [module for module in head.modules() if _is_linear(module)]
    if not found:
        raise ValueError(
            f"the head of {type(owner).__name__} cannot be patched: get_output_embeddings() is "
            f"{'None' if head is None else type(head).__name__}, and it must be, or hold, a torch.nn.Linear with the "
            f"forward of its class; the model was left as it was. {_advice(owner)}"
        )
    classes = max(module.out_features for module in found)
    return [module for module in found if module.out_features == classes]


def _is_linear(module: Any) -> bool:
    forward = type(module).forward
    given = vars(module).get("forward")
    if given is not None and not isinstance(module, DeferringHead) and not _is_of_plan(given):
        forward = getattr(vars(module).get("_old_forward"), "__func__", None)
    return isinstance(module, nn.Linear) and forward in (nn.Linear.forward, DeferringHead.forward)


_PLAIN = "xent.cross_entropy(outputs.logits, labels), which shifts nothing"
_FITS = {
    **dict.fromkeys(
        ("ForMaskedLM", *(f"For{kind}Classification" for kind in ("Token", "Sequence", "Image", "Video", "Audio"))),
        _PLAIN,
    ),
    "ForSemanticSegmentation": "xent.cross_entropy(logits, labels, axis=1) of logits in the size of the labels",
    "ForQuestionAnswering": "xent.cross_entropy(outputs.start_logits, start_positions), and the same of the end",
}
"""The `loss_type` of a transformers model -> the call that computes its loss."""


def _advice(model: Any) -> str:
    """Return one or two sentences that name the function to use for a model whose head cannot be patched."""
    head, kind = model.get_output_embeddings(), getattr(model, "loss_type", None)
    if kind in _FITS:
        few = " Where classes are few, little memory is saved." if head is None else ""
        return f"What fits its logits is {_FITS[kind]}.{few}"
    if kind in ("ForCausalLM", "ForConditionalGeneration") and not model.config.is_encoder_decoder:
        return (
            "With model.loss_function = xent.integrations.transformers.causal_lm_loss it still does without the "
            "float32 copies of its logits"
        )
    if head is None:
        return (
            "It has no language-model head: load the class that has one (transformers.AutoModelForCausalLM, "
            "AutoModelForMaskedLM, AutoModelForSeq2SeqLM), or call "
            "xent.linear_cross_entropy(outputs.last_hidden_state, "
            "classifier.weight, labels), with shift=1 for a causal model"
        )
    return f"What fits its logits is {_PLAIN}."


def defer_logits(head: Any, history: Any) -> bool:
    """Make a head defer its logits; return whether this changed the head."""
    watch(head)
    if _is_of_plan(vars(head).get("forward")):
        head._xent_plan = vars(head).pop("forward")
    changed = "_xent_history" not in vars(head)
    head._xent_history = history
    if not isinstance(head, DeferringHead):
        kind: Any = type(head)
        head.__class__ = _deferring(kind)
    _rebind(head)
    return changed


def restore(head: Any) -> None:
    """Make a head compute its logits again."""
    unwatch(head)
    vars(head).pop("_xent_history", None)
    plan = vars(head).pop("_xent_plan", None)
    if plan is not None:
        head.forward = plan
    if "_xent_kind" in vars(type(head)):  # otherwise another library has derived its own class from the head's
        head.__class__ = head._xent_kind
    _rebind(head)


def _rebind(head: Any) -> None:
    """Update `_old_forward`, the forward that accelerate's hooks call, to that of the head's present class."""
    if "_old_forward" in vars(head):
        head._old_forward = type(head).forward.__get__(head)
