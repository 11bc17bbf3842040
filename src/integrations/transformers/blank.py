"""The memory behind deferred logits: a single NaN, expanded to a tensor of any shape.

It is a custom operation because torch.compile would materialise an expanded tensor that a graph returns; the result of
a custom operation is returned unchanged. Elsewhere the memory is shared, because filling it is a launch on a GPU.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["blank"]

_storages: dict[tuple[torch.device, torch.dtype], Any] = {}
"""The memory of one NaN. Tensors that share it have a version counter each."""

_LIBRARY = torch.library.Library("xent", "FRAGMENT")
_LIBRARY.define("blank(Tensor like, SymInt[] size, ScalarType dtype) -> Tensor")


def _blank(like: Tensor, size: list[int], dtype: torch.dtype) -> Tensor:
    return like.new_full((), torch.nan, dtype=dtype).expand(size)


_LIBRARY.impl("blank", _blank, "CompositeExplicitAutograd")
torch.library.register_fake("xent::blank", _blank, lib=_LIBRARY)


def blank(like: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of that size, on the device of `like`, whose memory is a single NaN."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        made: Tensor = torch.ops.xent.blank(like.detach(), size, dtype)
        return made
    key = (like.device, dtype)
    storage = _storages.get(key)
    if storage is None:
        storage = torch.full((), torch.nan, dtype=dtype, device=like.device).untyped_storage()
        if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph's memory is its own
            _storages[key] = storage
    return torch.empty(0, dtype=dtype, device=like.device).set_(storage, 0, size, (0,) * len(size))
