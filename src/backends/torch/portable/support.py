"""The classes that a sampler allowed for each row, as rows of equal length, so that work does not grow with V."""

import torch
from torch import Tensor

from xent.core.call import Allowed

__all__ = ["Support"]


class Support:
    """The classes of N rows."""

    def __init__(self, allowed: Allowed, vocabulary: int) -> None:
        self._vocabulary, self._checked = vocabulary, allowed.broken is None
        self._classes, most = allowed.classes, len(allowed.classes)
        # Invalid offsets must not cause reads out of bounds.
        self._begin = allowed.begin.to(torch.int64).clamp(0, most)
        self._length = (allowed.end.to(torch.int64).clamp(0, most) - self._begin).clamp(min=0)
        self.longest = max(int(self._length.max()), 1) if len(self._length) else 1
        """The most classes of a row. On an accelerator the host waits for it."""

    def of(self, rows: slice | Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the classes of some rows, (R, L) int64 in rising order, whether an entry is one, and invalid rows.

        Entries that are no class hold V. Rows (R,) with a class outside [0, V) are invalid; None if it was checked.
        """
        begin, length = (one if rows is None else one[rows] for one in (self._begin, self._length))
        steps = torch.arange(self.longest, device=begin.device)
        valid = steps < length[:, None]
        if not len(self._classes):
            return valid.to(torch.int64) + self._vocabulary, valid, None
        places = (begin[:, None] + steps).clamp(max=len(self._classes) - 1)
        classes = self._classes[places].to(torch.int64)
        invalid = None
        if not self._checked:
            wrong = ((classes < 0) | (classes >= self._vocabulary)) & valid
            invalid, valid = wrong.any(-1), valid & ~wrong
        classes = classes.masked_fill(~valid, self._vocabulary).sort(-1).values
        return classes, classes < self._vocabulary, invalid
