"""Private functions of PyTorch, all in this file: why each is needed, and the slower public way that replaces it.

PyTorch has no public way to ask these questions. Where a release lacks a function, `_found` takes the answer that is
slower and never wrong: custom operations, a new gradient instead of reused memory, or PyTorch's own error.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["dispatch_modes", "group_named", "inspects", "keeps_graph", "skip_frames", "transforms_active"]

_torch: Any = torch  # type checkers do not know all of it


def _found(read: Callable[[], Any], otherwise: Callable[..., Any]) -> Any:
    """Return the function that `read` finds."""
    try:
        return read()
    except AttributeError:
        return otherwise


transforms_active: Callable[[], bool] = _found(lambda: torch._C._are_functorch_transforms_active, lambda: True)
"""() -> whether torch.func transforms run. Without it: custom operations for every call."""

dispatch_modes: Callable[[], int] = _found(lambda: torch._C._len_torch_dispatch_stack, lambda: 1)
"""() -> the number of modes that see every operation (fake tensors, selective checkpoints, FLOP counters). Without it:
custom operations for every call."""

keeps_graph: Callable[[], bool] = _found(lambda: _torch._C._autograd._get_current_graph_task_keep_graph, lambda: True)
"""() -> whether the running backward was given retain_graph=True. Without it: new gradients, never reused memory."""

_tracing: Callable[[], Any] = _found(lambda: _torch._guards.TracingContext.try_get, lambda: None)


def inspects() -> bool:
    """Return whether torch.compile traces or inspects values. Without it: False, and it computes deferred logits."""
    return _tracing() is not None


def skip_frames(function: Callable[..., Any]) -> None:
    """Let torch.compile not compile calls of a function outside of graphs, nor what it calls.

    `torch.compiler.disable` would end every graph at a call. Without it: RecursionError where deferred logits are read
    between two graphs of one compiled function.
    """

    def skip() -> None:
        frames = _torch._C._dynamo.eval_frame
        action = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(action, action))

    _found(skip, lambda: None)


def _no_groups(name: str) -> Any:
    raise RuntimeError(
        f"this PyTorch does not say which process group is called {name!r}: xent cannot serve shards here"
    )


def group_named(name: str) -> Any:
    """Return the process group of that name. Custom operations take groups by name. Without it: RuntimeError."""
    from torch.distributed import distributed_c10d  # some builds of PyTorch lack it

    distributed: Any = distributed_c10d
    return _found(lambda: distributed._resolve_process_group, _no_groups)(name)
