"""What is done to single elements: exponentials of full precision, and the activation of raw logits."""

import math
from collections.abc import Callable

import mlx.core as mx

from xent.backends.mlx.kernels import RowFacts

__all__ = ["activate", "exp", "expm1"]


def exp(x: mx.array) -> mx.array:
    """Return exp(x); MLX's own has no more than float32's precision even for float64."""
    return mx.power(mx.array(math.e, dtype=mx.float64), x) if x.dtype == mx.float64 else mx.exp(x)


def expm1(x: mx.array) -> mx.array:
    """Return exp(x) - 1."""
    return exp(x) - 1 if x.dtype == mx.float64 else mx.expm1(x)


def activate(z: mx.array, facts: RowFacts, placed: Callable[[mx.array], mx.array]) -> tuple[mx.array, mx.array | None]:
    """Return x = k tanh(s z / k), s z without softcap, and the softcap's slope, which 1 - tanh^2 would lose digits of.

    The slope lacks the factor s; it is None without softcap. `placed` makes (R,) values fit z.
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
