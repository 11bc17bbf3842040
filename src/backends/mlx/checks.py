"""Values that are wrong: with XENT_CHECK_TARGETS=1 they are looked at, and raise; without, their rows are NaN.

MLX computes later, and looking at a value computes it now. While `mx.compile` traces a function there are no values.
"""

import os
from typing import Any

import mlx.core as mx
import numpy as np

__all__ = ["check_targets", "check_temperature"]


def check_targets(target: mx.array, vocabulary: int, ignore_index: int, shift: int) -> None:
    """Raise IndexError for the first wrong target of those that a row uses."""
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


def check_temperature(temperature: mx.array, shift: int) -> None:
    """Raise ValueError for the first temperature that is not > 0, of those that a row uses."""
    values = _values(temperature)
    if values is None:
        return
    place = _first(~(values > 0), shift if values.ndim else 0)
    if place is not None:
        raise ValueError(f"temperature must be > 0 in every row, got {values[tuple(place)]} at {place}")


def _values(array: mx.array) -> Any:
    """Return an array's values, integers as int64 and floats as float64; None where nobody asks, or there are none."""
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
    """Return where an array is True first, after the first `shift` along the last axis."""
    if shift:
        wrong[..., :shift] = False
    return [int(index) for index in np.argwhere(wrong)[0]] if wrong.any() else None
