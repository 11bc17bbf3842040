"""The memory behind deferred logits: a single NaN, expanded to a tensor of any shape.

It is a custom operation because torch.compile would materialise an expanded tensor that a graph returns; the result of
a custom operation is returned unchanged.
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
    """Return a tensor of that size, on the device of `like`, whose memory is a single NaN."""
    made: Tensor = torch.ops.xent.blank(like.detach(), size, dtype)
    return made
