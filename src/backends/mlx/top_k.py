"""A top-k teacher's classes and log-probabilities as lazy MLX arrays, and the checks of their values."""

import os
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from xent.backends.mlx.tracing import is_traced
from xent.core.arrays import dtype_name
from xent.core.call import TopK
from xent.core.spec import mass_tolerance

__all__ = ["Known", "impossible", "known_classes"]


@dataclass(frozen=True, eq=False)
class Known:
    """The classes of N rows, and their log-probabilities in the accumulation dtype."""

    ids: mx.array
    """(N, K) integers; V for classes outside of [0, V), distinct negative numbers for padding entries."""
    log_q: mx.array
    """(N, K); -inf for padding entries."""
    tail: str
    tolerance: float
    """How far rounding may raise the sum of probabilities above 1."""

    def part(self, rows: slice, ignored: mx.array, vocabulary: int) -> "Known":
        """Return some rows (R, K), with id V for padding entries and in `ignored` rows (R,)."""
        ids = self.ids[rows]
        ids = mx.where((ids < 0) | ignored[:, None], vocabulary, ids)
        return Known(ids, self.log_q[rows], self.tail, self.tolerance)


def known_classes(teacher: TopK, vocabulary: int, acc: mx.Dtype) -> Known:
    """Return the classes of a prepared teacher."""
    given, log_q = teacher.ids.astype(mx.int64), teacher.log_probs.astype(acc)
    none = -1 - mx.arange(given.shape[1], dtype=mx.int64)
    ids = mx.where(log_q == -mx.inf, none, mx.where((given < 0) | (given >= vocabulary), vocabulary, given))
    return Known(ids, log_q, teacher.tail, mass_tolerance(dtype_name(teacher.log_probs)))


def impossible(known: Known, ignored: mx.array, vocabulary: int, shape: tuple[int, ...]) -> mx.array:
    """Return the rows (N,) with invalid values, but for ignored ones; raise if XENT_CHECK_TARGETS is 1.

    `shape` is that of a result per row.
    """
    outside = (known.ids == vocabulary).any(-1)
    ordered = mx.sort(known.ids, axis=-1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    mass = mx.exp(known.log_q).sum(-1)
    heavy = ~(mass <= 1 + known.tolerance)
    empty = mass == 0 if known.tail == "renormalize" else mx.zeros_like(heavy)
    wrong = (outside | repeated | heavy | empty) & ~ignored
    if os.environ.get("XENT_CHECK_TARGETS") == "1" and not is_traced(known.ids) and wrong.any().item():
        row = int(np.array(mx.argmax(wrong)))
        name = f"of row {[int(index) for index in np.unravel_index(row, shape)]}"
        if outside[row].item():
            raise IndexError(f"teacher.ids {name} holds a class outside of 0 to {vocabulary - 1}")
        if repeated[row].item():
            raise ValueError(f"teacher.ids {name} holds a class more than once")
        if empty[row].item():
            raise ValueError(f"teacher.log_probs {name} have no mass that could be renormalised")
        raise ValueError(
            f"teacher.log_probs {name} have a mass of {mass[row].item():.6g}, more than 1 by more than rounding"
        )
    return wrong
