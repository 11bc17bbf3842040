"""Checks of values that are on the CPU, as NumPy arrays: for NumPy calls, and with XENT_CHECK_TARGETS=1 for MLX."""

from typing import Any

import numpy as np

from xent.core.call import Source, vocabulary_of
from xent.core.spec import mass_tolerance

__all__ = ["check_subset", "check_support", "check_targets", "check_temperature", "check_top_k"]


def check_targets(ids: Any, vocabulary: int, ignore_index: int, shift: int) -> None:
    """Raise IndexError for the first invalid target. Rows do not use the first `shift` ones of the last axis."""
    place = _first(((ids < 0) | (ids >= vocabulary)) & (ids != ignore_index), shift)
    if place is not None:
        raise IndexError(
            f"target{place or ''} is {ids[tuple(place)]}; classes are 0 to {vocabulary - 1}, or "
            f"ignore_index={ignore_index}"
        )


def check_temperature(temperature: Any, shift: int) -> None:
    """Raise ValueError for the first temperature that a row uses and that is not > 0."""
    place = _first(~(temperature > 0), shift if temperature.ndim else 0)
    if place is not None:
        found = temperature[tuple(place)]
        raise ValueError(f"temperature must be > 0 in every row, got {found} at {place or 'its row'}")


def check_support(classes: Any, begin: Any, end: Any, vocabulary: int) -> None:
    """Raise ValueError if offsets do not increase from 0 to the number of ids, IndexError for the first invalid id."""
    sizes = end - begin
    first, last = (begin[0], end[-1]) if len(begin) else (0, 0)
    if first != 0 or (sizes < 0).any() or last != len(classes):
        raise ValueError(
            f"support.offsets must be non-decreasing from 0 to {len(classes)}, the number of ids; got {first} to {last}"
            + (" and a decrease between" if (sizes < 0).any() else "")
        )
    place = _first((classes < 0) | (classes >= vocabulary), 0)
    if place is not None:
        raise IndexError(f"support.ids{place} is {classes[place[0]]}; classes are 0 to {vocabulary - 1}")
    found, times = np.unique(np.repeat(np.arange(len(sizes)), sizes) * vocabulary + classes, return_counts=True)
    if (times > 1).any():
        row, again = divmod(int(found[times > 1][0]), vocabulary)
        raise ValueError(f"support.ids must hold a class at most once in a row; row {row} has {again} more than once")


def check_subset(ids: Any, source: Source) -> None:
    """Raise IndexError or ValueError for ids that are no classes of the teacher or repeat."""
    size = vocabulary_of(source)
    outside = np.flatnonzero((ids < 0) | (ids >= size))
    if outside.size:
        place = outside[0]
        raise IndexError(f"teacher.ids[{place}] is {ids[place]}; the teacher's classes are 0 to {size - 1}")
    ordered = np.sort(ids)
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    if again.size:
        raise ValueError(f"teacher.ids of a xent.Subset must hold a class at most once, got {ordered[again[0]]} again")


def check_top_k(ids: Any, log_probs: Any, used: Any, tail: str, dtype: str, vocabulary: int) -> None:
    """Raise for the first invalid row of a top-k teacher that is `used` (...); `dtype` is that of `log_probs`."""
    known = log_probs != -np.inf
    outside = known & ((ids < 0) | (ids >= vocabulary))
    # Padding entries get distinct negative numbers.
    ordered = np.sort(np.where(known, ids, -1 - np.arange(ids.shape[-1])), -1)
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    mass = np.exp(log_probs).sum(-1)
    heavy, empty = ~(mass <= 1 + mass_tolerance(dtype)), (mass == 0) & (tail == "renormalize")
    place = _first((outside.any(-1) | repeated | heavy | empty) & np.asarray(used, bool), 0)
    if place is None:
        return
    row, name = tuple(place), f"of row {place}"
    if outside[row].any():
        found = ids[row][outside[row]][0]
        raise IndexError(f"teacher.ids {name} holds {found}; classes are 0 to {vocabulary - 1}")
    if repeated[row]:
        raise ValueError(f"teacher.ids {name} holds a class more than once")
    if heavy[row]:
        raise ValueError(f"teacher.log_probs {name} have a mass of {mass[row]:.6g}, more than 1 by more than rounding")
    raise ValueError(f"teacher.log_probs {name} have no mass that could be renormalised")


def _first(wrong: Any, shift: int) -> list[int] | None:
    """Return the position of the first True, without the first `shift` entries of the last axis."""
    if shift:
        wrong[..., :shift] = False
    return [int(index) for index in np.argwhere(wrong)[0]] if wrong.any() else None
