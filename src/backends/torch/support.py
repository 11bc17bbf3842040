"""Supports (the classes that a sampler allowed for each row) as ragged rows, and sums over them.

All arrays have one entry per pair of a row and one of its classes, the rows one after the other: M pairs, not (N, V).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.rows import shifted

__all__ = ["Pairs", "Support", "check_support", "support_of"]

_SUMS = ("cpu", "cuda")
"""Devices on which PyTorch can sum ragged rows and has float64. For other devices the rows are computed on the CPU."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """P pairs of a row and one of its classes, in the order of rows, on the device that computes them."""

    rows: Tensor
    """(P,) int64"""
    classes: Tensor
    """(P,) int64 in [0, V)."""
    offsets: Tensor
    """(R + 1,) int64: the start of each row."""
    wrong: Tensor | None
    """(P,) bool: ids that were outside [0, V) and were clamped; None if there are none."""

    def each_row(self, values: Tensor) -> Tensor:
        """Repeat values (R,) per row for each pair, (P,)."""
        return values[self.rows]

    def sum(self, values: Tensor) -> Tensor:
        """Sum values (P,) over the classes of each row, (R,), always in the same order."""
        return torch.segment_reduce(values, "sum", offsets=self.offsets, unsafe=True, initial=0)

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest value of each row, (R,); -inf for a row without classes."""
        return torch.segment_reduce(values, "max", offsets=self.offsets, unsafe=True, initial=-torch.inf)


@dataclass(frozen=True, eq=False)
class Support:
    """The classes ids[begin_i : begin_i + length_i] of N rows."""

    ids: Tensor
    begin: Tensor
    length: Tensor
    known: int | None
    """The number of ids of all rows; None if only the device knows it."""
    vocabulary: int
    broken: Tensor | None
    """0-d bool: whether the offsets are invalid; None if they have been checked."""

    def select(self, rows: Tensor) -> "Support":
        """Return the support of these rows, given as indices (M,) int64."""
        rows = rows.to(self.begin.device)
        return replace(self, begin=self.begin[rows], length=self.length[rows], known=None)

    def pairs(self, start: int, stop: int) -> Pairs:
        """Return the pairs of rows [start, stop).

        On an accelerator the host waits for the number of pairs, unless these are all rows.
        """
        length, whole = self.length[start:stop], stop - start == len(self.length)
        total = self.known if whole and self.known is not None else int(length.sum())
        ends = length.cumsum(0)
        rows = torch.arange(stop - start, device=length.device).repeat_interleave(length, output_size=total)
        places = torch.arange(total, device=length.device) + (self.begin[start:stop] - ends + length)[rows]
        classes = self.ids[places]
        offsets = torch.cat((ends.new_zeros(1), ends))
        if self.broken is None:
            return Pairs(rows, classes, offsets, None)
        wrong = (classes < 0) | (classes >= self.vocabulary)
        return Pairs(rows, classes.clamp(0, self.vocabulary - 1), offsets, wrong)


def support_of(ids: Tensor, offsets: Tensor, shape: torch.Size, shift: int, vocabulary: int, checked: bool) -> Support:
    """Return the support of the rows of `shape`; row t has entry t + `shift`. `checked`: values are known valid."""
    if ids.device.type not in _SUMS:
        ids, offsets = ids.cpu(), offsets.cpu()
    ends = offsets.to(torch.int64)
    broken = None
    if not checked:  # invalid values must not cause reads out of bounds
        rising = ends.clamp(0, len(ids)).cummax(0).values
        rising[0], rising[-1] = 0, len(ids)
        broken, ends = (rising != ends).any(), rising
    ids = ids.to(torch.int64)
    begin, length = (shifted(values.view(shape), shift, 0).flatten() for values in (ends[:-1], ends.diff()))
    return Support(ids, begin, length, None if shift else len(ids), vocabulary, broken)


def check_support(ids: Any, offsets: Any, vocabulary: int) -> None:
    """Raise ValueError or IndexError for an invalid support."""
    ends, classes = offsets.to(torch.int64), ids.to(torch.int64)
    sizes = ends.diff()
    falls = bool((sizes < 0).any())
    if int(ends[0]) != 0 or falls or int(ends[-1]) != len(ids):
        raise ValueError(
            f"support.offsets must be non-decreasing from 0 to {len(ids)}, the number of ids; got {int(ends[0])} to "
            f"{int(ends[-1])}" + (" and a decrease between" if falls else "")
        )
    wrong = (classes < 0) | (classes >= vocabulary)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise IndexError(f"support.ids[{place}] is {int(classes[place])}; classes are 0 to {vocabulary - 1}")
    keys = torch.arange(len(sizes), device=ids.device).repeat_interleave(sizes) * vocabulary + classes
    if bool((keys.diff() <= 0).any()):
        keys = keys.sort().values
        again = keys[1:][keys.diff() == 0]
        if len(again):
            row, repeated = divmod(int(again[0]), vocabulary)
            raise ValueError(
                f"support.ids must hold a class at most once in a row; row {row} has {repeated} more than once"
            )
