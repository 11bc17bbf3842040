"""Elementwise functions: exponentials with full precision, and the activation (scale and softcap) of raw logits."""

import math
from typing import Any

import mlx.core as mx

__all__ = ["activate", "exp", "expm1"]


def exp(x: mx.array) -> mx.array:
    """Return exp(x). MLX's own has only float32 precision, also for float64."""
    return mx.power(mx.array(math.e, dtype=mx.float64), x) if x.dtype == mx.float64 else mx.exp(x)


def expm1(x: mx.array) -> mx.array:
    """Return exp(x) - 1."""
    return exp(x) - 1 if x.dtype == mx.float64 else mx.expm1(x)


def activate(z: mx.array, scale: Any, softcap: Any) -> tuple[mx.array, mx.array | None]:
    """Return x = k tanh(s z / k), or s z without softcap k, and the softcap's slope, None without softcap.

    The slope does not include the factor s. It is not computed as 1 - tanh^2, which would cancel. `scale` and `softcap`
    are numbers, or arrays that are broadcast with z; None for neither.
    """
    x = z if scale is None else z * scale
    if softcap is None:
        return x, None
    inside = x / softcap
    return softcap * mx.tanh(inside), 1 / mx.square(mx.cosh(inside))
