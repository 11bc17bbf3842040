"""Arithmetic of the divergence kernels, in terms that are never negative and do not cancel.

With u = log o - log w, a divergence sum_c w (log w - log o) is computed as the sum of w (e^u - 1 - u) = o - w - w u, as
in `xent.backends.torch.divergence.plain`.
"""

import triton
import triton.language as tl

from xent.backends.triton.maths import LOG2E, exp, log1p

__all__ = ["exact_exp", "expm1", "gap", "log_share", "pulled"]

# ln 2 in two parts: the first has so few bits that its products with small integers are exact.
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.12194440e-4)


@triton.jit
def exact_exp(x):
    """Return e^x for x < 88 with an error of one or two roundings for any x; 0 below e^-87.

    GPUs approximate 2^x to two units in the last place. The polynomial has the smallest relative error of its degree on
    [-ln(2) / 2, ln(2) / 2] (Lawson's iteration in float64).
    """
    near = tl.maximum(x, -87.0, propagate_nan=tl.PropagateNan.ALL)
    whole = tl.floor(near * LOG2E + 0.5)
    rest = tl.fma(whole, -LN2_LOW, tl.fma(whole, -LN2_HIGH, near))
    series = 0.0013811662355812532
    series = tl.fma(rest, series, 0.008370134913053884)
    series = tl.fma(rest, series, 0.041668528282492644)
    series = tl.fma(rest, series, 0.16666508716099204)
    series = tl.fma(rest, series, 0.49999992629512235)
    power = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87, 0.0, power * (1 + tl.fma(rest * rest, series, rest)))


@triton.jit
def _excess(u):
    """Return e^u - 1 - u for u <= 1, by a series if the difference would cancel."""
    small = tl.where(tl.abs(u) < 0.5, u, 0.0)
    series = tl.fma(small, 1 / 3628800, 1 / 362880)
    series = tl.fma(small, series, 1 / 40320)
    series = tl.fma(small, series, 1 / 5040)
    series = tl.fma(small, series, 1 / 720)
    series = tl.fma(small, series, 1 / 120)
    series = tl.fma(small, series, 1 / 24)
    series = tl.fma(small, series, 1 / 6)
    series = tl.fma(small, series, 0.5)
    return tl.where(tl.abs(u) < 0.5, small * small * series, exp(u) - 1 - u)


@triton.jit
def expm1(u):
    """Return e^u - 1 for u <= 0."""
    return tl.where(u < -0.5, exp(u) - 1, _excess(tl.where(u < -0.5, 0.0, u)) + u)


@triton.jit
def gap(w, o, u):
    """Return w (e^u - 1 - u) for o = w e^u: o - w - w u if e^u is large, and o if w is 0."""
    found = tl.where(u > 1, o - w - w * u, w * _excess(tl.where(u > 1, 0.0, u)))
    return tl.where(w == 0, o, found)


@triton.jit
def log_share(apart, beta):
    """Return log m - log p - max(apart, 0) for m = (1 - beta) p + beta q and apart = log q - log p."""
    share = tl.where(apart > 0, 1 - beta, beta)
    return log1p(share * expm1(-tl.abs(apart)))


@triton.jit
def pulled(p, u, mean):
    """Return p (mean - u); 0 if p is 0."""
    return tl.where(p == 0, 0.0, p * (mean - u))
