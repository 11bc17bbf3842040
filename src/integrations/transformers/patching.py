"""patch and unpatch, and the heads that defer their logits: a subclass of torch.nn.Linear.

The weight of a tensor-parallel head is a DTensor. PyTorch's ColwiseParallel adds two hooks to the head: one converts
hidden states to DTensors, one redistributes the logits. The hooks stay, and deferred logits record the redistribution.
The plans of transformers instead replace the head's forward by one that does both. `patch` removes that forward; it is
called only if logits are computed.

The first head that defers its logits installs a hook that PyTorch calls after each step of each optimizer; `unpatch` of
the last one removes it.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, __version__  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from transformers.trainer_pt_utils import LabelSmoother  # pyright: ignore[reportMissingImports]

from xent.backends.torch.private import transforms_active
from xent.integrations.patch import Patch, inner, name_of, replace, restore
from xent.integrations.transformers.calls import smooth_from_hidden_states
from xent.integrations.transformers.deferred import (
    Recipe,
    autocast_dtype,
    defer,
    in_shards,
    local,
    origin,
    shards,
    steps,
)
from xent.integrations.transformers.history import History, begin_call
from xent.integrations.trl import WITHOUT_PATCH, computes_with

__all__ = [
    "defer_logits",
    "find_heads",
    "find_owner",
    "history_of",
    "patch",
    "unpatch",
    "why_unused",
]

if str(__version__).startswith(("3.", "4.")):
    raise ImportError(
        f"xent.integrations.transformers needs transformers 5, found {__version__}: pip install 'transformers>=5', or "
        "call xent.linear_cross_entropy instead of head and loss"
    )

Head = Any
"""A head: its class has `_DeferringHead`, or gets it."""
Owner = Any
"""A model of transformers or PEFT."""
_histories: "weakref.WeakKeyDictionary[nn.Module, History]" = weakref.WeakKeyDictionary()
"""Patched model -> its history. Its heads, and copies of them, refer to the same history."""
_hook: list[RemovableHandle] = []


def patch(model: nn.Module | None = None) -> Patch:
    """Compute a transformers model's loss from its hidden states, without its logits.

    The head then returns deferred logits, which are computed only if something reads them. A scale or a softcap between
    head and loss becomes part of the loss. ``outputs.logits``, generation, metrics, and every function that xent does
    not know get the logits of the unpatched model. Nothing else of the model changes: not its class, its parameters or
    its checkpoints. If a training step still computes logits, the first one emits a warning, and `explain` says
    why.

    Parameters
    ----------
    model : transformers.PreTrainedModel, optional
        A model with a language-model head, or a PEFT, DDP or FSDP2 wrapper around one. Without it, every model that is
        created later is patched, by its class or by ``from_pretrained``; models whose head cannot be patched stay
        unchanged. Patch a model after adding a PEFT adapter to the head itself, and after loading it with a
        tensor-parallel plan of transformers. With a plan the classes stay in shards and the logits are not gathered.

    Returns
    -------
    Patch
        A context manager that undoes the patch. It may be ignored.

    Raises
    ------
    ValueError
        The model has no head whose logits can be deferred. It is unchanged.

    Examples
    --------
    >>> import torch, transformers
    >>> from xent.integrations.transformers import patch
    >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    ...                                   num_attention_heads=2)
    >>> model, tokens = transformers.LlamaForCausalLM(config), torch.arange(8)[None]
    >>> plain = model(tokens, labels=tokens).loss
    >>> with patch(model):
    ...     fused = model(tokens, labels=tokens).loss
    >>> torch.testing.assert_close(fused, plain)
    """
    if model is None:
        return Patch(unpatch if replace(PreTrainedModel, "post_init", _patching(PreTrainedModel.post_init)) else None)
    owner = find_owner(model)
    heads = find_heads(owner)
    replace(LabelSmoother, "__call__", smooth_from_hidden_states(LabelSmoother.__call__))
    history = next(filter(None, map(history_of, heads)), None) or History("")  # an inner model's heads have one
    history.name, head = type(owner).__name__, owner.get_output_embeddings()
    if head not in heads:
        history.head = f" Its head is a {type(head).__module__}.{type(head).__name__}."
    _histories[owner] = history
    changed = [defer_logits(head, history) for head in heads]
    return Patch(functools.partial(unpatch, model) if any(changed) else None, model)


def unpatch(model: nn.Module | None = None) -> None:
    """Undo `patch`: restore the head of a model. Without a model, stop patching models that are created later.

    Parameters
    ----------
    model : transformers.PreTrainedModel, optional
        The patched model. A model that is not patched stays unchanged.

    Raises
    ------
    ValueError
        The model has no head that can be patched.
    """
    if model is None:
        restore(PreTrainedModel, "post_init")
    else:
        owner = find_owner(model)
        for head in find_heads(owner):
            _restore_head(head)
        _histories.pop(owner, None)
    if not steps:
        restore(LabelSmoother, "__call__")
        while _hook:
            _hook.pop().remove()


def _patching(post_init: Callable[..., None]) -> Any:
    """Return a `post_init` that patches the model."""

    @functools.wraps(post_init)
    def post_init_and_patch(self: Any) -> None:
        post_init(self)
        with contextlib.suppress(ValueError):  # no head, or one that cannot be patched
            patch(self)

    return post_init_and_patch


def history_of(module: nn.Module) -> History | None:
    """Return the history of a patched model or of one of its heads."""
    return vars(module).get("xent_history", _histories.get(module))


def why_unused(model: Owner) -> str:
    """Return why the heads of a patched model were not called."""
    head = model.get_output_embeddings()
    if head is not None and all(history_of(part) is None for part in head.modules()):
        return "its head was replaced after patch(model), as resize_token_embeddings does: call patch(model) again"
    for module in model.modules():
        forward = inner(vars(module).get("forward"))  # accelerate's wraps that of the class
        own = [inner(vars(kind).get("forward")) for kind in type(module).__mro__]
        if forward not in own:  # classes without a forward add None
            return f"the forward of its {type(module).__name__} was replaced by {forward.__module__}.{name_of(forward)}"
    return "its head was not called"


def _watch(head: nn.Module) -> None:
    """Count the steps of optimizers that hold a weight of this head."""
    steps.setdefault(head, 0)
    if not _hook:
        _hook.append(register_optimizer_step_post_hook(_after_step))  # pyright: ignore[reportArgumentType]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # traced, it would lose its effect
def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Count a step, also in the weights' version counters, and warn if it did not call the head of a patched model.

    PyTorch calls this after each step of each optimizer. A head is not called if it or a forward was replaced.
    """
    trained = {id(weight) for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad}
    for head in list(steps):
        own = list(head.parameters())  # none if FSDP1 holds them: then any step may be one on them
        weights = [local(weight) for weight in own if id(weight) in trained]
        if weights or not own:
            increment_version(weights)
            steps[head] += 1
    for history, model in {history: model for model, history in _histories.items()}.items():
        counted = not any(call.compiled for call in history.last.values())  # compiled code does not record its calls
        unused = counted and (optimizer in history.stepped or not history.last)
        history.stepped.add(optimizer)
        if unused and any(id(weight) in trained for weight in model.parameters()):
            history.went_past = True
            whose = computes_with(model)
            if whose != "xent":
                history.warn(WITHOUT_PATCH if whose else why_unused(model), unused=bool(whose))


class _DeferringHead:
    """Mixin that makes a subclass of torch.nn.Linear defer its logits. It is the first base of the class."""

    xent_plain: type
    """The class without this mixin."""
    xent_history: History | None = None
    """The history of the model. None: the logits are not deferred."""
    xent_plan: Callable[[Tensor], Tensor] | None = None
    """The forward that a tensor-parallel plan of transformers gave the head."""

    def __call__(self: Head, *args: Any, **kwargs: Any) -> Any:
        """Call the head, but without DeepSpeed's hooks, which gather a weight, if logits are deferred."""
        if hasattr(self._parameters.get("weight"), "ds_id") and not kwargs:
            logits = _deferred(self, args[0], self.weight, self.bias)
            if logits is not None:
                return logits
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(self: Head, input: Tensor, task: Callable[..., Tensor] | None = None) -> Any:
        """Return deferred logits if possible, otherwise logits. With a task, return task(input, weight, bias)."""
        weight, bias = self.weight, self.bias  # a parametrization computes them at each look
        if task is not None:
            return task(input, weight, bias)
        logits = None if hasattr(weight, "ds_id") else _deferred(self, input, weight, bias)
        plan = getattr(self, "xent_plan", None)  # a plan may still call this forward when the class was restored
        if logits is not None or plan is None:
            return F.linear(input, weight, bias) if logits is None else logits
        history, self.xent_plan, self.xent_history = self.xent_history, None, None  # the plan may call this forward
        try:
            return plan(input)
        finally:
            self.xent_plan, self.xent_history = plan, history

    def __reduce_ex__(self: Head, protocol: Any) -> Any:
        """Pickle with the original class, because the class of the head cannot be imported."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, (self.xent_plain,), *reduced[2:]


class _DeferringTokens(_DeferringHead):
    """Mixin for PEFT's layer of trained tokens, which are rows of its weight; its base layer is the head."""

    def forward(self: Head, input: Tensor, *args: Any) -> Any:
        """Return deferred logits, or what the layer returns."""
        active, logits = self.active_adapters, None
        if len(active) == 1 and not (self.disable_adapters or self.merged):
            logits = _deferred(self, input, self.get_merged_weights(active), None)
        return super(_DeferringHead, self).forward(input) if logits is None else logits  # type: ignore[misc]


@functools.cache
def _deferring(kind: type) -> type:
    """Return the subclass of `kind` that defers its logits."""
    mixin = _DeferringTokens if hasattr(kind, "get_merged_weights") else _DeferringHead
    return type(f"Deferring{kind.__name__}", (mixin, kind), {"xent_plain": kind})


def _new(kind: type) -> Head:
    """Return an empty head for unpickling."""
    return object.__new__(_deferring(kind))


def _deferred(head: Head, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return deferred logits, or None if this call must compute its logits."""
    history, compiling = getattr(head, "xent_history", None), torch.compiler.is_compiling()
    if history is None:
        return None
    why = _why_computed(head, input, weight, bias)
    training = head.training and torch.is_grad_enabled()
    call: Any = None if _is_exporting() else begin_call(history.key, training, compiling, why)
    if why is not None:
        return None
    is_planned = in_shards(weight) and (in_shards(input) or head.xent_plan is not None)
    if in_shards(input):  # its gradient is summed over ranks
        input = input.to_local(grad_placements=input.placements)
    if not compiling:
        _watch(head)
        if input.is_inference():
            input = input.clone()  # no version counter would count a write to it
    caller, autocast = _caller(head, weight), autocast_dtype(input.device.type)
    added = ("the classes stay in shards",) * in_shards(weight) + ("the head's bias added",) * (bias is not None)
    size = (*input.shape[:-1], getattr(weight, "ds_shape", weight.shape)[0])
    return defer(
        Recipe(
            (input,),
            (weight,),
            bias,
            (
                origin("hidden states", input),
                *[origin("weights", each, head, caller is not None) for each in (weight, bias) if each is not None],
            ),
            call,
            size,
            torch.empty(size, device="meta").stride(),
            autocast or input.dtype,
            input.device,
            autocast,
            caller,
            steps=added,
            placement=weight.placements[0] if in_shards(weight) and head.xent_plan is None else None,
            is_planned=is_planned,
        )
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_exporting() -> bool:
    """Whether torch.export traces the model. Before PyTorch 2.13 Dynamo replaces the same call by True."""
    return torch.compiler.is_exporting()


def _why_computed(head: Head, input: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Return why this call must compute its logits, or None if it can defer them.

    Logits are deferred for plain tensors, if no hook needs the head's output. Without gradients they are not deferred
    for a single position, which means generation, nor under torch.compile: there, inference mode, in which tensors have
    no version counter, cannot be detected.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and (torch.jit.is_tracing() or transforms_active()):  # type: ignore[attr-defined]
        return "torch.jit or torch.func traces the model"
    if not torch.is_grad_enabled() and (input.ndim < 2 or input.shape[-2] == 1):
        return "there is one position, as in generation"
    if not compiling and _is_of_plan(vars(head).get("forward")):
        return "transformers made the head tensor-parallel after patch(model): call patch(model) after that"
    if in_shards(weight):
        why = _why_computed_in_shards(head, input, weight)
        if why is not None:
            return why
    else:
        for tensor, name in ((input, "hidden states"), (weight, "weight")):
            if type(tensor) not in (Tensor, nn.Parameter):
                return f"the head's {name} are a {type(tensor).__name__}"
    if not all(shards(hook) for hook in head._forward_hooks.values()):
        return "the head has a forward hook, which is given its logits"
    if input.device != weight.device or input.device.type == "meta":
        return f"the head's hidden states are on {input.device}, its weight is on {weight.device}"
    dtypes = {tensor.dtype for tensor in (input, weight, bias) if tensor is not None}
    if len(dtypes) > 1 if autocast_dtype(input.device.type) is None else torch.float64 in dtypes:
        return f"hidden states, weight and bias of the head differ in dtype, or are float64 under autocast: {dtypes}"
    if compiling and (not torch.is_grad_enabled() or _is_exporting()):
        return "the model is exported, or compiled without gradients"
    return None


def _why_computed_in_shards(head: Head, input: Tensor, weight: Any) -> str | None:
    """Return why a head whose weight is a DTensor cannot defer its logits, or None."""
    if torch.compiler.is_compiling():
        return "torch.compile defers no logits with classes in shards"
    mesh, placements = weight.device_mesh, tuple(weight.placements)
    if mesh.ndim > 1 or not placements[0].is_shard(0):
        return f"the head's weight has placements {placements}, and they must be (Shard(dim=0),) when it is called"
    if in_shards(input) and (input.device_mesh != mesh or not all(each.is_replicate() for each in input.placements)):
        return f"the head's hidden states have placements {input.placements} on {input.device_mesh}"
    if head.xent_plan is None:
        return None
    style = inspect.getclosurevars(head.xent_plan).nonlocals["self"]
    layout = getattr(style, "output_layouts", None)
    if layout is None or not layout.is_replicate() or not style.use_local_output:
        return (
            f"its tensor-parallel plan gives the head transformers' {type(style).__name__}, and logits are deferred "
            'for "colwise_gather_output" and "replicate"'
        )
    return None


def _is_of_plan(forward: object) -> bool:
    """Whether a forward was installed by transformers' tensor parallelism."""
    is_theirs = str(getattr(forward, "__module__", "")).startswith("transformers.")
    return is_theirs and "install_forward.<locals>.tp_forward" in repr(forward)


def _caller(head: Head, weight: Tensor) -> Callable[..., Tensor] | None:
    """Return what calls the head so that its weight is gathered, if it may be gathered only for that."""
    if torch.compiler.is_compiling():
        return None
    if hasattr(weight, "ds_id"):
        return head  # type: ignore[no-any-return]
    if hasattr(head, "unshard"):  # `fully_shard` was applied to the head, alone or with other modules
        return functools.partial(_gathered, head)
    if isinstance(weight, nn.Parameter):
        return None
    for model, history in _histories.items():
        for module in model.modules() if history is head.xent_history else ():
            if getattr(module, "module", None) is head:  # FSDP1
                return module
    return None


def _gathered(head: Head, input: Tensor, task: Callable[..., Tensor]) -> Any:
    """Return the result of the head's forward, with the weights of its FSDP2 group."""
    head.unshard()
    try:
        return head.forward(input, task)
    finally:
        head.reshard()


def find_owner(model: nn.Module) -> Owner:
    """Return the transformers or PEFT model inside of wrappers; raise ValueError if there is none."""
    owner: Owner = model
    while not hasattr(owner, "get_output_embeddings") and isinstance(getattr(owner, "module", None), nn.Module):
        owner = owner.module  # a wrapper such as DistributedDataParallel
    if not hasattr(owner, "get_output_embeddings"):
        raise ValueError(
            f"model must be a transformers model with a language-model head, got {type(model).__name__}, which has no "
            "get_output_embeddings(); for other models call xent.linear_cross_entropy instead of head and loss"
        )
    return owner


def find_heads(owner: Owner) -> list[nn.Module]:
    """Return the linear layers that compute the model's logits; raise ValueError if there are none.

    With PEFT there may be several: the head, trained copies of it, and the low-rank weights of LoRA.
    """
    head = owner.get_output_embeddings()
    linears: list[Head] = [] if head is None else [module for module in head.modules() if _is_linear(module)]
    if not linears:
        causal = getattr(owner, "loss_type", None) == "ForCausalLM"
        raise ValueError(
            f"the head of {type(owner).__name__} cannot be patched: get_output_embeddings() is "
            f"{'None' if head is None else type(head).__name__}, and it must be, or hold, a torch.nn.Linear with the "
            f"forward of its class; the model was left as it was. {_CAUSAL if causal else _ADVICE}"
        )
    classes = max(module.out_features for module in linears)
    return [module for module in linears if module.out_features == classes]


def _is_linear(module: Any) -> bool:
    linear = module.base_layer if hasattr(module, "get_merged_weights") else module
    forward = inner(vars(linear).get("forward", type(linear).forward))
    known = forward is nn.Linear.forward or _is_of_plan(forward)
    return isinstance(linear, _DeferringHead) or (isinstance(linear, nn.Linear) and known)


_ADVICE = (
    "What fits its logits is xent.cross_entropy(outputs.logits, labels), which shifts nothing; for images of labels, "
    "xent.cross_entropy(logits, labels, axis=1) of logits in the size of the labels; for questions and answers, "
    "xent.cross_entropy(outputs.start_logits, start_positions), and the same of the end. If it has no language-model "
    "head: load the class that has one (transformers.AutoModelForCausalLM, AutoModelForMaskedLM, "
    "AutoModelForSeq2SeqLM), or call xent.linear_cross_entropy(outputs.last_hidden_state, classifier.weight, labels), "
    "with shift=1 for a causal model"
)
_CAUSAL = (
    "With model.loss_function = xent.integrations.transformers.causal_lm_loss it still does without the float32 copies "
    "of its logits"
)


def defer_logits(head: Any, history: History) -> bool:
    """Make a head defer its logits; return whether this changed the head."""
    _watch(head)
    if _is_of_plan(vars(head).get("forward")):
        head.xent_plan = vars(head).pop("forward")
    changed = "xent_history" not in vars(head)
    head.xent_history = history
    if not isinstance(head, _DeferringHead):
        _set_class(head, _deferring(head.__class__))
    return changed


def _restore_head(head: Any) -> None:
    """Make a head compute its logits again."""
    steps.pop(head, None)
    vars(head).pop("xent_history", None)
    plan = vars(head).pop("xent_plan", None)
    if plan is not None:
        head.forward = plan
    kind = getattr(head, "xent_plain", None)
    if kind is not None and type(head) is _deferring(kind):  # otherwise another library has derived its own class
        _set_class(head, kind)


def _set_class(head: Head, kind: type) -> None:
    """Set the head's class, and bind its forward again where an attribute, such as one of accelerate's, holds it."""
    for name, value in vars(head).items():
        if getattr(value, "__func__", None) is type(head).forward:
            setattr(head, name, kind.forward.__get__(head))  # type: ignore[attr-defined]
    head.__class__ = kind
