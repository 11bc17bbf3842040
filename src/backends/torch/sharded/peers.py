"""Errors on one rank: name the rank, and tell the other ranks while they wait for the layout of the call.

If a group has never agreed on a layout, all other ranks wait for it or have the same error. Later, a rank cannot know
whether the others wait, so it only raises its error.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xent.backends.torch import private
from xent.backends.torch.sharded import layout
from xent.core.arrays import describe
from xent.core.errors import BackendError
from xent.core.spec import Shards, VocabParallel

__all__ = ["group_of", "told"]

_OURS = (ValueError, TypeError, IndexError, BackendError)


def group_of(given: Any) -> Any:
    """Return the process group of a `vocab_parallel` argument, or raise TypeError or ValueError."""
    group = given.group if isinstance(given, VocabParallel | Shards) else given
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"vocab_parallel must be a DeviceMesh of one dimension, got one of {group.ndim}, "
                f"{group.mesh_dim_names or tuple(group.shape)}: pass the one that shards the vocabulary, mesh[name]"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "vocab_parallel must be a torch.distributed process group, a DeviceMesh of one dimension or a "
            f"xent.VocabParallel of one, got {describe(group)}"
        )
    return group


def told(given: Any, array: Any) -> AbstractContextManager[None]:
    """Return a context in which errors name this rank and are sent to ranks that wait for it."""
    if private.is_watched():
        return nullcontext()
    return _told(given, array)


@contextmanager
def _told(given: Any, array: Any) -> Iterator[None]:
    try:
        yield
    except layout.Refused as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        group = _group_or_none(given)
        if group is None:
            raise
        if not layout.is_known(group):
            layout.refuse(group, f"{type(error).__name__}: {error}", array.device)
        if type(error) in _OURS:
            raise type(error)(f"rank {group.rank()}: {error}") from error
        raise


def _group_or_none(given: Any) -> Any:
    try:
        return group_of(given)
    except (TypeError, ValueError):
        return None
