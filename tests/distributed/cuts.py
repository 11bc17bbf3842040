"""The ways in which the tests split a vocabulary into shards."""

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CUTS", "Cut", "cut"]

CUTS = ("even", "uneven", "empty first", "empty", "padded", "reversed")


@dataclass(frozen=True)
class Cut:
    """Rank r has the classes [firsts[r], firsts[r] + rows[r]); those from `vocabulary` on are padding."""

    vocabulary: int
    firsts: tuple[int, ...]
    rows: tuple[int, ...]
    says_first: bool = False
    says_size: bool = False

    def take(self, array: Any, rank: int, axis: int) -> Any:
        """Return a rank's shard of an array, with NaN for padding."""
        first, rows = self.firsts[rank], self.rows[rank]
        here = np.arange(first, min(first + rows, self.vocabulary))
        part = np.take(array, here, axis)
        missing = [(0, 0)] * array.ndim
        missing[axis] = (0, rows - len(here))
        return np.pad(part, missing, constant_values=np.nan) if rows > len(here) else part

    def join(self, parts: list[Any], axis: int) -> Any:
        """Concatenate the shards of all ranks; padding must be zero."""
        pieces = []
        for rank in np.argsort(self.firsts, kind="stable"):
            first, rows = self.firsts[rank], self.rows[rank]
            real = max(min(first + rows, self.vocabulary) - first, 0)
            padding = np.take(parts[rank], np.arange(real, rows), axis)
            assert (padding == 0).all(), "padding must have no gradient"
            pieces.append(np.take(parts[rank], np.arange(real), axis))
        return np.concatenate(pieces, axis)


def cut(how: str, vocabulary: int, ranks: int) -> Cut:
    """Return one of `CUTS`."""
    step = -(-vocabulary // ranks)
    stops = [min((rank + 1) * step, vocabulary) for rank in range(ranks)]
    if how == "uneven":
        stops = [min(2 + 3 * rank, vocabulary) for rank in range(ranks - 1)] + [vocabulary]
    elif how == "empty first":
        stops = [0, *stops[:-2], vocabulary] if ranks > 1 else stops
    elif how == "empty":
        stops = [*stops[:-2], vocabulary, vocabulary] if ranks > 1 else stops
    elif how == "padded":
        rows = step + 3
        return Cut(vocabulary, tuple(rank * rows for rank in range(ranks)), (rows,) * ranks, says_size=True)
    firsts, rows = [0, *stops[:-1]], [stop - first for first, stop in zip([0, *stops[:-1]], stops, strict=True)]
    if how == "reversed":
        return Cut(vocabulary, tuple(firsts[::-1]), tuple(rows[::-1]), says_first=True)
    return Cut(vocabulary, tuple(firsts), tuple(rows))
