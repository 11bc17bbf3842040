"""The history of each patched model: whether its logits were computed, and what has changed since its head was called.

The first is for `explain` and for one warning per model.

A step that is not fused computes the right numbers, but takes the memory that `patch` should save. The first such
training step emits a warning with the function that read the logits and the line that called it. The functions that
record something take and return numbers, because torch.compile passes only constants to what it calls while it traces.

Deferred logits that are computed later must not use changed weights. An `Origin` stores the state of each tensor.
Writes increment a tensor's version counter. Fused optimizers do not, so that a hook does it after each step, for the
weights of the heads that defer logits. Writes through `parameter.data` increment nothing. For those, an `Origin` stores
the address of the tensor and a few elements of a weight. Elements are compared only when the logits are read, because
that synchronises with the device.
"""

import inspect
import itertools
import sys
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

__all__ = [
    "Call",
    "History",
    "Origin",
    "begin_call",
    "check_gathered",
    "check_unchanged",
    "histories",
    "history_of",
    "inner",
    "local",
    "looks",
    "note",
    "origin",
    "shards",
    "trl_computes_with",
    "unwatch",
    "watch",
    "why_unused",
]

_INSIDE = ("torch.", f"{__name__.rpartition('.')[0]}.")
"""Packages that are skipped in a stack trace, because the user's line is above them."""

histories: "weakref.WeakKeyDictionary[nn.Module, History]" = weakref.WeakKeyDictionary()
"""Patched model -> its history. Its heads, and copies of them, refer to the same history."""

_by_key: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""The histories, and the last calls of their heads."""
_keys = itertools.count(1)


@dataclass(eq=False)
class Call:
    """One call of a head."""

    history: "History"
    training: bool
    compiled: bool
    fused: str | None = None
    """If the loss was computed without logits: the operations between head and loss, in words."""
    computed: str | None = None
    """If the logits were computed: the reason."""


class History:
    """The last training step and the last evaluation of a patched model."""

    def __init__(self, name: str) -> None:
        self.name, self.key = name, next(_keys)
        self.last: dict[bool, Call] = {}
        """The last call in training (True) and in evaluation (False)."""
        self.stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """The optimizers that made a step since the last call of the head."""
        self.went_past = False
        """Whether a training step since then did not call the head."""
        self._warned = False
        _by_key[self.key] = self

    def __deepcopy__(self, memo: Any) -> "History":
        """Return the same object: PEFT copies the head, and its copy belongs to the same model."""
        return self

    def __reduce__(self) -> Any:
        """Pickle only the name."""
        return History, (self.name,)

    def warn(self, reason: str, unused: bool = False) -> None:
        """Warn once that training is not fused, or does not use xent, and why."""
        if self._warned:
            return
        self._warned = True
        compiled = True in self.last and self.last[True].compiled
        said = f"training this {self.name} takes the memory of its logits, as without xent"
        said = "this compiled training step takes the memory of its logits, as without xent" if compiled else said
        said = f"training this {self.name} is not using xent" if unused else said
        details = "For details, print(xent.integrations.transformers.explain(model))"
        warnings.warn(f"{said}: {reason}. {details}", RuntimeWarning, stacklevel=2)


def history_of(module: nn.Module) -> History | None:
    """Return the history of a patched model or of one of its heads."""
    return vars(module).get("xent_history", histories.get(module))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def begin_call(key: int, training: bool, compiled: bool, computed: str | None) -> int:
    """Record a call of a head, and why it computes its logits. Return what `note` takes."""
    history, call = _by_key[key], next(_keys)
    history.went_past = False
    history.stepped.clear()
    history.last[training] = _by_key[call] = Call(history, training, compiled)
    if computed is not None:
        note(call, "computed", computed)
    return call


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note(call: int, what: str, said: str) -> int:
    """Record what is known of a call, "fused" or "computed". Warn in training if it is not fused."""
    last = _by_key.get(call)
    if last is not None:
        setattr(last, what, said)
        if last.training and last.fused is None:
            last.history.warn(said)
    return 0


def looks(function: Any) -> str:
    """Return in words that a function reads the logits, and the line that called it."""
    if torch.compiler.is_compiling():
        return "what is compiled looks at them"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(_INSIDE):
        frame = frame.f_back
    where = "" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return f"{_name(function)} looked at them {where}"


def _name(function: Any) -> str:
    """Return a function's name for messages, for example `Tensor.max`."""
    function = inner(function)
    name = getattr(function, "__name__", type(function).__name__)
    return f"Tensor.{name}" if hasattr(torch.Tensor, name) else str(getattr(function, "__qualname__", name))


def inner(function: Any) -> Any:
    """Return the function inside of decorators such as accelerate's, of a functools.partial and of a method."""
    function = inspect.unwrap(function)
    function = getattr(function, "func", function)
    return getattr(function, "__func__", function)


def shards(hook: Any) -> bool:
    """Whether a hook is one of PyTorch's or DeepSpeed's for models in shards, which does not need the logits."""
    return str(getattr(inner(hook), "__module__", "")).startswith(("torch.distributed.", "deepspeed."))


def why_unused(model: Any) -> str:
    """Return why the heads of a patched model were not called."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None and all(history_of(part) is None for part in head.modules()):
        return "its head was replaced after patch(model), as resize_token_embeddings does: call patch(model) again"
    for module in model.modules():
        forward = inner(vars(module).get("forward"))  # accelerate's wraps that of the class
        own = [inner(vars(kind).get("forward")) for kind in type(module).__mro__]
        if forward is not None and forward not in own:
            code = getattr(forward, "__code__", None)
            where = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
            return f"the forward of its {type(module).__name__} was replaced by {_name(forward)}{where}"
    return "its head was not called"


def trl_computes_with(model: nn.Module) -> str | None:
    """Return which library computes the log-probabilities in TRL's forward of a model: "xent" or "trl".

    TRL's `add_fused_lm_head` replaces the forward of a model by one that computes log-probabilities from hidden states
    and does not call the head. It looks its kernel up in its own module, where `xent.integrations.trl.patch` installs
    xent's. Return None if the model's forward is not TRL's.
    """
    for forward in [vars(module).get("forward") for module in model.modules()]:
        while forward is not None:
            names = getattr(forward, "__globals__", {})
            if names.get("__name__") == "trl.trainer.utils":
                module = getattr(names.get("_ChunkedLogProbFunction"), "__module__", "")
                return "xent" if module.startswith("xent.") else "trl"
            forward = getattr(forward, "__wrapped__", None)
    return None


_steps: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
"""Each head that defers its logits -> the number of optimizer steps on its weights."""
_hook: list[Any] = []


_TRL_WITHOUT = (
    "its forward is TRL's, which computes log-probabilities with TRL's kernels until you call "
    "xent.integrations.trl.patch()"
)
_MOVED = "moved, replaced, sharded or offloaded (parameter.data = ..., model.to(...), merging an adapter)"


@dataclass(frozen=True, eq=False)
class Origin:
    """A tensor from which logits are computed, and its state when the head was called."""

    name: str
    source: Tensor
    kept: Any
    """The tensor, or this process's shard of it. None if FSDP frees what it gathers for the head's call."""
    head: nn.Module | None
    """The head whose optimizer steps count."""
    gathered: bool
    """Whether the weight may be whole only during the head's call."""
    state: dict[str, Any]
    """What must stay the same, by the words for a change."""
    sample: Tensor | None
    """Some elements of a weight."""


def origin(name: str, tensor: Tensor, head: nn.Module | None = None, gathered: bool = False) -> Origin:
    """Return the present state of a tensor: "hidden states" or "weights"."""
    head = None if torch.compiler.is_compiling() else head
    shard = local(tensor)
    kept = None if gathered and shard is tensor else shard
    sample = None if name == "hidden states" else _sample(tensor if kept is None else kept).clone()
    return Origin(name, tensor, kept, head, gathered, _state(kept, head, gathered), sample)


def _state(tensor: Any, head: nn.Module | None, gathered: bool) -> dict[str, Any]:
    state: dict[str, Any] = {} if head is None else {"changed by an optimizer's step": _steps.get(head, 0)}
    if tensor is not None:
        compiling = torch.compiler.is_compiling()  # Dynamo cannot trace Tensor.is_inference and addresses
        if not gathered and not compiling:
            state[_MOVED] = tensor.data_ptr()
        state["written to in place"] = tensor._version if compiling or not tensor.is_inference() else 0
    return state


def check_unchanged(origins: Iterable[Origin], looked_at: bool = True) -> None:
    """Raise RuntimeError if computing the logits would no longer give those of the unpatched model.

    Elements of weights are compared, which synchronises with the device, only if the logits are `looked_at`.
    """
    if torch.compiler.is_compiling():
        return
    looked_at = looked_at and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    for one in origins:
        now = _state(one.kept, one.head, one.gathered)
        happened = next((words for words, value in one.state.items() if now[words] != value), None)
        if happened is not None:
            raise _changed(one.name, happened)
        if looked_at and one.kept is not None:
            _compare(one, one.kept)


def check_gathered(origins: Iterable[Origin], weights: Iterable[Tensor | None]) -> None:
    """Compare elements of weights that were gathered again with those at the head's call; RuntimeError if they differ.

    FSDP frees such weights after the call, so `check_unchanged` has nothing to look at.
    """
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    own = [one for one in origins if one.name == "weights"]
    for one, weight in zip(own, weights, strict=False):
        if one.kept is None and weight is not None:
            _compare(one, weight)


def _compare(one: Origin, tensor: Tensor) -> None:
    """Raise RuntimeError if the elements of a weight are not those at the head's call."""
    if one.sample is not None and not torch.allclose(_sample(tensor), one.sample, 0, 0, equal_nan=True):
        raise _changed(one.name, "written to through parameter.data (by hand, or by merging an adapter)")


def _changed(name: str, happened: str) -> RuntimeError:
    return RuntimeError(
        f"these logits were never computed, and cannot be computed now: the {name} were {happened} after the model was "
        "called. Read them before that, for example with outputs.logits.detach(). With FSDP2, keep the outermost group "
        "unsharded after forward: fully_shard(model, reshard_after_forward=False). Or restore the model's own head "
        "with xent.integrations.transformers.unpatch(model)"
    )


def watch(head: nn.Module) -> None:
    """Count the steps of optimizers that hold a weight of this head."""
    _steps.setdefault(head, 0)
    if not _hook:
        hook: Any = torch.compiler.disable(_after_step)  # traced, it would lose its effect
        _hook.append(register_optimizer_step_post_hook(hook))


def unwatch(*heads: nn.Module) -> bool:
    """Undo `watch`. Return whether no head is left, and remove the hook then."""
    for head in heads:
        _steps.pop(head, None)
    if _hook and not _steps:
        _hook.pop().remove()
    return not _steps


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count a step, also in the weights' version counters, and warn if it did not call the head of a patched model.

    PyTorch calls this after each step of each optimizer. A head is not called if it or a forward was replaced.
    """
    trained = {id(weight) for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad}
    for head in list(_steps):
        own = list(head.parameters())  # none if FSDP1 holds them: then any step may be one on them
        weights = [local(weight) for weight in own if id(weight) in trained]
        if weights or not own:
            increment_version(weights)
            _steps[head] += 1
    for history, model in {history: model for model, history in histories.items()}.items():
        counted = not any(call.compiled for call in history.last.values())  # compiled code does not record its calls
        unused = counted and (optimizer in history.stepped or not history.last)
        history.stepped.add(optimizer)
        if unused and any(id(weight) in trained for weight in model.parameters()):
            history.went_past = True
            whose = trl_computes_with(model)
            if whose != "xent":
                history.warn(why_unused(model) if whose is None else _TRL_WITHOUT, unused=whose is not None)


def local(weight: Any) -> Tensor:
    """Return what this process keeps of a weight: its shard in DeepSpeed's ZeRO-3 or in a DTensor."""
    shard: Any = getattr(weight, "ds_tensor", weight)
    if hasattr(shard, "placements"):
        with torch.no_grad():
            shard = shard.to_local()
    return shard  # type: ignore[no-any-return]


def _sample(weight: Tensor) -> Tensor:
    """Return a strided view of some hundred elements of a weight."""
    return weight.detach()[tuple([slice(None, None, max(size // 16, 1)) for size in weight.shape])]
