"""Shift values of targets to the rows that predict them."""

from typing import Any

import mlx.core as mx

__all__ = ["shifted"]


def shifted(values: mx.array, shift: int, fill: Any) -> mx.array:
    """Return an array with values[..., t + shift] at t, and `fill` past the end."""
    if not shift:
        return values
    kept = values[..., shift:]
    missing = (*values.shape[:-1], values.shape[-1] - kept.shape[-1])
    return mx.concatenate([kept, mx.full(missing, fill, dtype=values.dtype)], axis=-1)
