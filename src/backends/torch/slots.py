"""Where the tensors of a recorded call are: in slots, which another call fills with its own tensors."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.private import storage_of

__all__ = ["Memory", "Place", "Slots"]

Memory = list[Any]
"""A call's tensors by slot: first the arguments, then what the call allocates; None before and after its use.

Other objects of the call have slots as well.
"""


class Place(NamedTuple):
    """Where a tensor is: in the memory of the tensor of a slot."""

    slot: int
    whole: bool
    """Whether it is the slot's tensor itself."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """From the first element of the slot's tensor, in elements."""
    itemsize: int

    def tensor(self, memory: Memory) -> Tensor:
        """Return the tensor at this place in the memory of a call."""
        base: Tensor = memory[self.slot]
        if self.whole:
            return base
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


@dataclass(eq=False)
class Slots:
    """The slots of memory while a call is recorded."""

    device: torch.device
    owners: dict[Any, list[int]] = field(default_factory=dict)
    """Storage -> slots that are in it. As long as it is here, no other storage is taken for it."""
    spans: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int, int] | None] = field(default_factory=list)
    """Of each slot: dtype, size, stride, and the first and the last element in the storage; None for other objects."""

    def add(self, tensor: Tensor) -> int:
        """Append a slot."""
        slot, first = len(self.spans), int(tensor.storage_offset())
        self.owners.setdefault(storage_of(tensor), []).append(slot)
        self.spans.append((tensor.dtype, tensor.shape, tensor.stride(), first, first + _extent(tensor)))
        return slot

    def reserve(self) -> int:
        """Append a slot for an object that is no tensor."""
        self.spans.append(None)
        return len(self.spans) - 1

    def find(self, tensor: Tensor) -> Place | None:
        """Return where a tensor is, None if in no slot."""
        if tensor.device != self.device:
            return None
        first = int(tensor.storage_offset())
        last = first + _extent(tensor)
        for slot in self.owners.get(storage_of(tensor), ()):
            dtype, size, stride, begin, end = self._span(slot)
            if tensor.dtype == dtype and begin <= first and last <= end:
                whole = tensor.shape == size and tensor.stride() == stride and first == begin
                return Place(slot, whole, tensor.shape, tensor.stride(), first - begin, tensor.itemsize)
        return None

    def overlap(self) -> bool:
        """Whether slots share memory, other than as the same tensor."""
        for slots in self.owners.values():
            spans = sorted({self._span(slot)[1:] for slot in slots}, key=lambda span: span[2:])
            if any(one[3] > other[2] for one, other in pairwise(spans)):
                return True
        return False

    def _span(self, slot: int) -> tuple[torch.dtype, torch.Size, tuple[int, ...], int, int]:
        span = self.spans[slot]
        assert span is not None
        return span


def _extent(tensor: Tensor) -> int:
    """Return the number of elements from a tensor's first to its last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
