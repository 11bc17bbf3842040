"""Private functions of PyTorch, all in this file: why each is needed, and the slower public way that replaces it.

PyTorch has no public way to ask these questions. Where a release lacks a function, `_found` takes the answer that is
slower and never wrong: custom operations, a new gradient instead of reused memory, or PyTorch's own error.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "dispatch_modes",
    "forward_level",
    "group_named",
    "keeps_graph",
    "saved_hooks",
    "transforms_active",
    "transforms_of",
]

_functorch: Any = getattr(torch._C, "_functorch", None)  # type checkers do not know it
_autograd: Any = getattr(torch._C, "_autograd", None)


def _found(module: Any, name: str, otherwise: Callable[..., Any]) -> Any:
    return getattr(module, name, otherwise)


transforms_active: Callable[[], bool] = _found(torch._C, "_are_functorch_transforms_active", lambda: True)
"""() -> whether torch.func transforms run. Without it: custom operations for every call."""

dispatch_modes: Callable[[], int] = _found(torch._C, "_len_torch_dispatch_stack", lambda: 1)
"""() -> the number of modes that see every operation (fake tensors, selective checkpoints, FLOP counters). Without it:
custom operations for every call."""

keeps_graph: Callable[[], bool] = _found(_autograd, "_get_current_graph_task_keep_graph", lambda: True)
"""() -> whether the running backward was given retain_graph=True. Without it: new gradients, never reused memory."""

saved_hooks: Callable[[bool], Any] = _found(_autograd, "_top_saved_tensors_default_hooks", lambda ignores_tracing: None)
"""(ignore that a tracer runs) -> the innermost hooks on tensors that autograd saves, those of a checkpoint among them.
Without it: deferred logits that are read in a checkpoint that did not call the head raise CheckpointError."""


forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", 0)
"""() -> the level of forward mode, -1 outside, where no tensor has a tangent. Without it: custom operations."""


def transforms_of(tensor: Tensor) -> set[str]:
    """Return the kinds of torch.func transforms that wrap a tensor. Its Python type is Tensor nevertheless.

    "Grad", "Vmap", "Jvp", "Functionalize". Without these functions: PyTorch's own errors.
    """
    if _functorch is None:
        return set()
    kinds = {interpreter.level(): interpreter.key().name for interpreter in _functorch.get_interpreter_stack() or []}
    found = set()
    while _functorch.is_functorch_wrapped_tensor(tensor):
        found.add(kinds.get(_functorch.maybe_get_level(tensor), ""))
        tensor = _functorch.get_unwrapped(tensor)
    return found


def _no_groups(name: str) -> Any:
    raise RuntimeError(
        f"this PyTorch does not say which process group is called {name!r}: xent cannot serve shards here"
    )


def group_named(name: str) -> Any:
    """Return the process group of that name. Custom operations take groups by name. Without it: RuntimeError."""
    from torch.distributed import distributed_c10d  # some builds of PyTorch lack it

    return _found(distributed_c10d, "_resolve_process_group", _no_groups)(name)
