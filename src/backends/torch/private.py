"""Private functions of PyTorch, all in this file: why each is needed, and what happens in a release without it.

PyTorch has no public way to ask these questions. Every function here was tried on PyTorch 2.6, 2.11 and 2.13. Where a
release lacks one, `_found` takes the answer that is slower and never wrong: custom operations instead of direct
launches, a new gradient instead of reused memory, PyTorch's own error instead of ours.

Each function is bound once, so that a call costs no attribute look-ups, and stays PyTorch's own object, which
torch.compile knows by identity.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch

__all__ = [
    "PLAIN_TYPES",
    "DispatchMode",
    "alive",
    "allocator",
    "any_autocast",
    "apply_of",
    "below_autograd",
    "direct",
    "forward_mode",
    "group_named",
    "is_batched_gradient",
    "is_exporting",
    "is_watched",
    "jit_traces",
    "keeps_graph",
    "saved_hooks",
    "storage_of",
    "transforms_active",
    "transforms_of",
    "transforms_possible",
]

PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
"""Plain tensor types. `torch.overrides.has_torch_function` does not detect subclasses such as FakeTensor and DTensor,
which do not override __torch_function__."""


_functorch: Any = getattr(torch._C, "_functorch", None)  # type checkers do not know it
_autograd: Any = getattr(torch._C, "_autograd", None)


def _found(module: Any, name: str, otherwise: Callable[..., Any]) -> Any:
    return getattr(module, name, otherwise)


transforms_active: Callable[[], bool] = _found(torch._C, "_are_functorch_transforms_active", lambda: False)
"""() -> whether torch.func transforms (grad, vjp, vmap, jvp, functionalize) run. Without it: PyTorch's own errors."""

transforms_possible: Callable[[], bool] = _found(torch._C, "_are_functorch_transforms_active", lambda: True)
"""() -> the same. Without it: new gradients, never reused memory."""

_is_wrapped = _found(_functorch, "is_functorch_wrapped_tensor", lambda tensor: False)
_unwrap = _found(_functorch, "get_unwrapped", lambda tensor: None)
_level = _found(_functorch, "maybe_get_level", lambda tensor: 0)
_stack = _found(_functorch, "get_interpreter_stack", list)


def transforms_of(tensor: Tensor) -> set[str]:
    """Return the kinds of torch.func transforms that wrap a tensor. Its Python type is Tensor nevertheless.

    "Grad", "Vmap", "Jvp", "Functionalize". Without these functions: PyTorch's own errors.
    """
    kinds = {interpreter.level(): interpreter.key().name for interpreter in _stack() or []}
    found = set()
    while _is_wrapped(tensor):
        found.add(kinds.get(_level(tensor), ""))
        tensor = _unwrap(tensor)
    return found


alive: Callable[[Tensor], Tensor] = _found(_functorch, "unwrap_if_dead", lambda tensor: tensor)
"""(tensor) -> the tensor in the wrapper of a torch.func transform that has ended, otherwise the same. Tried on PyTorch
2.13 only. Without it: see `apply_of`."""


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a Function's `apply` for calls outside torch.func, whose tensors are `alive`.

    `Function.apply` itself looks at every argument for such wrappers, which takes 3 us in Python. It is returned where
    PyTorch has no `alive`.
    """
    direct: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return direct if hasattr(_functorch, "unwrap_if_dead") else function.apply


is_batched_gradient: Callable[[Tensor], bool] = _found(_functorch, "is_legacy_batchedtensor", lambda tensor: True)
"""(tensor) -> whether torch.autograd.grad(is_grads_batched=True) batches it; other functions do not show that. Without
it: new gradients, never reused memory."""

keeps_graph: Callable[[], bool] = _found(_autograd, "_get_current_graph_task_keep_graph", lambda: True)
"""() -> whether the running backward was given retain_graph=True. Without it: new gradients, never reused memory."""

saved_hooks: Callable[[bool], Any] = _found(_autograd, "_top_saved_tensors_default_hooks", lambda ignores_tracing: None)
"""(ignore that a tracer runs) -> the innermost hooks on tensors that autograd saves, those of a checkpoint among them.
Without it: deferred logits that are read in a checkpoint that did not call the head raise CheckpointError."""

any_autocast: Callable[[], bool] = _found(torch._C, "_is_any_autocast_enabled", lambda: True)
"""() -> whether autocast is on for any device. Without it: a look at the device's own."""

DispatchMode: Any = getattr(_python_dispatch, "TorchDispatchMode", None)
"""The base class of modes that see every operation. Without it: no recordings of calls.

Subclasses that return False from `_should_skip_dynamo` are used without importing the compiler, which takes a second.
"""


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's storage. Two references are equal if the storage is the same.

    While a reference exists, no other storage equals it, but the storage's memory may be freed. Public addresses do not
    tell storages apart: empty ones all have address 0, and a new storage may lie where a freed one was.
    """
    return StorageWeakRef(tensor.untyped_storage())


_function_modes: Callable[[], int] = _found(torch._C, "_len_torch_function_stack", lambda: 1)
_dispatch_modes: Callable[[], int] = _found(torch._C, "_len_torch_dispatch_stack", lambda: 1)
jit_traces: Callable[[], bool] = _found(torch._C, "_is_tracing", _found(torch.jit, "is_tracing", lambda: False))
"""() -> whether torch.jit.trace runs. Without it: the public function, which takes five times as long."""

is_exporting: Callable[[], bool] = _found(torch.compiler, "is_exporting", lambda: False)
"""() -> whether torch.export traces; public since PyTorch 2.7. Without it: exported programs give no gradients."""

below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", None)
"""() -> a context in which an operation skips its autograd kernel. Without it: no such kernels."""

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def allocator(device: torch.device) -> Allocate:
    """Return a function (size, stride, dtype) -> tensor with any content, on the current device of this type.

    Programs that torch.compile makes allocate so. The public function, used without it, looks for modes that have to
    see the allocation, and takes twice the time.
    """
    guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)

    def public(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    found: Allocate = _found(guards, f"_empty_strided_{device.type}", public)
    return found


def direct(operation: Any) -> Callable[..., Any]:
    """Return what an operation, such as torch.ops.aten.mm.out, calls. Without it: the operation, in twice the time."""
    found: Callable[..., Any] = _found(operation, "_op", operation)
    return found


_dynamo_traces: Callable[[], bool] = torch.compiler.is_dynamo_compiling  # public; half of is_compiling's time


def _no_groups(name: str) -> Any:
    raise RuntimeError(
        f"this PyTorch does not say which process group is called {name!r}: xent cannot serve shards here"
    )


def group_named(name: str) -> Any:
    """Return the process group of that name. Custom operations take groups by name.

    Functional collectives use the same function. Without it: RuntimeError, and no vocabulary in shards.
    """
    from torch.distributed import distributed_c10d  # some builds of PyTorch lack it

    return _found(distributed_c10d, "_resolve_process_group", _no_groups)(name)


def forward_mode() -> bool:
    """Return whether a forward-mode level is active, in which any tensor may have a tangent.

    The public `forward_ad.unpack_dual` takes ten times as long and one tensor at a time. Without the number: True.
    """
    return getattr(forward_ad, "_current_level", 0) >= 0


def is_watched() -> bool:
    """Return whether a tracer, a transform or a mode is active, which has to see the custom operations.

    These are: torch.compile and torch.export (also while AOT Autograd traces), torch.func, fake tensors, make_fx,
    dispatch modes (selective checkpoints, FLOP counters), function modes (a default device), torch.jit.trace and
    forward mode. About 0.5 us.
    """
    return bool(
        _dynamo_traces()
        or _dispatch_modes()
        or _function_modes()
        or transforms_possible()
        or jit_traces()
        or getattr(forward_ad, "_current_level", 0) >= 0
    )
