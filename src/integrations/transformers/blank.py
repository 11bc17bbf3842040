"""The memory behind deferred logits: one NaN, seen as a tensor of any shape.

It is a custom operation so that torch.compile returns it from a graph as it is, where it would write out an
expanded tensor of its own.
"""

import torch
from torch import Tensor

__all__ = ["blank"]

_LIBRARY = torch.library.Library("xent", "FRAGMENT")
_LIBRARY.define("blank(Tensor like, SymInt[] size, ScalarType dtype) -> Tensor")


def _blank(like: Tensor, size: list[int], dtype: torch.dtype) -> Tensor:
    return like.new_full((), torch.nan, dtype=dtype).expand(size)


_LIBRARY.impl("blank", _blank, "CompositeExplicitAutograd")
torch.library.register_fake("xent::blank", _blank, lib=_LIBRARY)


def blank(like: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of that size on the device of `like` that takes the memory of one element, a NaN."""
    made: Tensor = torch.ops.xent.blank(like.detach(), size, dtype)
    return made
