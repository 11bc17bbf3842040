"""Checks of values, with XENT_CHECK_TARGETS=1. Without it, rows with invalid values are NaN.

MLX is lazy, so reading a value evaluates it. While `mx.compile` traces a function there are no values to check.
"""

import os
from typing import Any

import mlx.core as mx
import numpy as np

from xent.core.call import Allowed, Source
from xent.core.describe_divergence import check_values

__all__ = ["check_subset", "check_support", "check_targets", "check_temperature"]


def check_targets(target: mx.array, vocabulary: int, ignore_index: int, shift: int) -> None:
    """Raise IndexError for the first invalid target that a row uses."""
    values = _values(target)
    if values is None:
        return
    wrong = ((values < 0) | (values >= vocabulary)) & (values != ignore_index)
    place = _first(wrong, shift)
    if place is not None:
        raise IndexError(
            f"target{place or ''} is {values[tuple(place)]}; classes are 0 to {vocabulary - 1}, or "
            f"ignore_index={ignore_index}"
        )


def check_subset(ids: mx.array, source: Source) -> None:
    """Raise IndexError or ValueError for ids of a `xent.Subset` that are no classes of the teacher, or repeat."""
    values = _values(ids)
    if values is not None:
        check_values(values, source)


def check_temperature(temperature: mx.array, shift: int) -> None:
    """Raise ValueError for the first temperature that a row uses and that is not > 0."""
    values = _values(temperature)
    if values is None:
        return
    place = _first(~(values > 0), shift if values.ndim else 0)
    if place is not None:
        raise ValueError(f"temperature must be > 0 in every row, got {values[tuple(place)]} at {place}")


def check_support(support: Allowed, vocabulary: int) -> None:
    """Raise ValueError if offsets do not increase from 0 to the number of ids, IndexError for the first invalid id."""
    ids, begin, end = map(_values, (support.classes, support.begin, support.end))
    if ids is None or begin is None or end is None:
        return
    counts = end - begin
    if begin[0] != 0 or end[-1] != len(ids) or (counts < 0).any():
        raise ValueError(
            f"support.offsets must be non-decreasing from 0 to {len(ids)}, the number of ids; got {begin[0]} to "
            f"{end[-1]}" + (" and a decrease between" if (counts < 0).any() else "")
        )
    place = _first((ids < 0) | (ids >= vocabulary), 0)
    if place is not None:
        raise IndexError(f"support.ids{place} is {ids[place[0]]}; classes are 0 to {vocabulary - 1}")
    row = np.repeat(np.arange(len(counts)), counts)
    found, times = np.unique(row * vocabulary + ids, return_counts=True)
    if (times > 1).any():
        again, name = divmod(int(found[times > 1][0]), vocabulary)
        raise ValueError(f"support.ids must hold a class at most once in a row; row {again} has {name} more than once")


def _values(array: mx.array) -> Any:
    """Return an array's values as int64 or float64; None if checks are off, or while mx.compile traces."""
    if os.environ.get("XENT_CHECK_TARGETS") != "1":
        return None
    try:
        mx.eval(array)
    except ValueError:
        return None
    if mx.issubdtype(array.dtype, mx.floating):
        return np.array(array if array.dtype == mx.float64 else array.astype(mx.float32)).astype(np.float64)
    return np.array(array).astype(np.int64)


def _first(wrong: Any, shift: int) -> list[int] | None:
    """Return the position of the first True, without the first `shift` entries of the last axis."""
    if shift:
        wrong[..., :shift] = False
    return [int(index) for index in np.argwhere(wrong)[0]] if wrong.any() else None
