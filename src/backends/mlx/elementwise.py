"""Elementwise functions: exponentials with full precision, and the activation (scale and softcap) of raw logits."""

import math
from collections.abc import Callable

import mlx.core as mx

from xent.backends.mlx.kernels import RowFacts

__all__ = ["activate", "exp", "expm1"]


def exp(x: mx.array) -> mx.array:
    """Return exp(x). MLX's own has only float32 precision, also for float64."""
    return mx.power(mx.array(math.e, dtype=mx.float64), x) if x.dtype == mx.float64 else mx.exp(x)


def expm1(x: mx.array) -> mx.array:
    """Return exp(x) - 1."""
    return exp(x) - 1 if x.dtype == mx.float64 else mx.expm1(x)


def activate(z: mx.array, facts: RowFacts, placed: Callable[[mx.array], mx.array]) -> tuple[mx.array, mx.array | None]:
    """Return x = k tanh(s z / k), or s z without softcap, and the softcap's slope, None without softcap.

    The slope does not include the factor s. It is not computed as 1 - tanh^2, which would cancel. `placed` reshapes
    values (R,) for broadcasting with z.
    """

    def given(name: str) -> mx.array:
        values = facts.of_rows(name)
        return placed(values) if values.ndim else values

    x = z * given("logit_scale") if facts.terms.scale else z
    if not facts.terms.softcap:
        return x, None
    softcap = given("softcap")
    inside = x / softcap
    return softcap * mx.tanh(inside), 1 / mx.square(mx.cosh(inside))
