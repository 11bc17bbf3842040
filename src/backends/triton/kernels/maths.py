"""Arithmetic that all kernels share: activation of logits and its slope, exponents.

Multiply-adds that must round once are written as `tl.fma`. What the compiler fuses by itself depends on the surrounding
code, so that copies of the same lines (a loop and its last block) could round differently.
"""

import triton
import triton.language as tl

__all__ = [
    "FAR",
    "FLOOR",
    "LN2",
    "LOG2E",
    "NOWHERE",
    "activate",
    "capped_exponent",
    "exp",
    "exponent",
    "finite",
    "log1p",
    "order",
    "quick_exponent",
    "rounding",
    "slope",
    "tanh",
    "times",
]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# If the reference is this large, subtract before multiplying: its product with log2(e) would round too much.
FAR = tl.constexpr(256.0)
# Base-2 exponents below this are raised to it before multiplying by e^(x - m), which is 0 there: avoids 0 * inf.
FLOOR = tl.constexpr(-300.0)
NOWHERE = tl.constexpr(2147483647)  # a class after all others


@triton.jit
def exp(x):
    """Return e^x; 0 if it is too small for a normal float32. tl.exp needs three more instructions for those values."""
    return tl.math.exp2(x * LOG2E)


@triton.jit
def tanh(u):
    """Return tanh(u) with an error of one or two roundings.

    For small u, 1 - 2 / (exp(2u) + 1) would cancel, so an odd polynomial is used. It has the smallest relative error of
    its degree on [0, 0.625] (Lawson's iteration in float64).
    """
    size = tl.abs(u)
    small = tl.where(size < 0.625, u, 0.0)
    square = small * small
    series = -0.005704986397176981
    series = tl.fma(square, series, 0.02063908614218235)
    series = tl.fma(square, series, -0.05373971536755562)
    series = tl.fma(square, series, 0.13331441581249237)
    series = tl.fma(square, series, -0.3333328068256378)
    near = tl.fma(small * square, series, small)
    far = 1 - 2 / (exp(2 * tl.where(size > 20, 20.0, size)) + 1)
    return tl.where(size < 0.625, near, tl.where(u < 0, -far, far))


@triton.jit
def times(share, value):
    """Return share * value; 0 where the share is 0, even if the value is infinite."""
    return share * tl.where(share == 0, 0.0, value)


@triton.jit
def _below(x, softcap):
    """Return b = 1 / (1 + e^(2 x / k)), from which both the softcap and its slope are computed.

    A GPU computes special functions at an eighth of its rate, and a capped logit needs two exponentials besides. So
    this reciprocal is made of other operations: a guess from the bits of the number, wrong by up to 1/18, a cubic and a
    quadratic step. Its error is one or two roundings. It is exactly 1 for x = -inf, where the slope is 0, and at least
    2e-38.
    """
    n = tl.maximum(-1 - tl.math.exp2(x * ((2 * LOG2E) / softcap)), -4e37, propagate_nan=tl.PropagateNan.ALL)
    b = (-0x010E0000 - n.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    rest = tl.fma(n, b, 1.0)
    b = tl.fma(tl.fma(rest, rest, rest), b, b)
    return tl.fma(tl.fma(n, b, 1.0), b, b)


@triton.jit
def activate(z, bend, way: tl.constexpr, EXACT: tl.constexpr = False):
    """Return x = k tanh(s z / k) for bend = (s, k), or s z without a softcap; s is 1 without a scale.

    `Way.quick` computes the softcap as k - 2k / (1 + e^(2 s z / k)), with an error of up to k / (3 * 10^6), which is
    enough for 16-bit logits, unless EXACT.
    """
    x = z * bend[0] if way.scaled else z
    if way.capped:
        if way.quick and not EXACT:
            x = tl.fma(_below(x, bend[1]), -2 * bend[1], bend[1])
        else:
            x = bend[1] * tanh(x / bend[1])
    return x


@triton.jit
def slope(z, bend, way: tl.constexpr, EXACT: tl.constexpr = False):
    """Return dx/dz of `activate`: s (1 - tanh(s z / k)^2), computed without cancellation, or s without a softcap."""
    found = tl.zeros_like(z) + (bend[0] if way.scaled else 1.0)
    if way.capped:
        x = z * bend[0] if way.scaled else z
        if way.quick and not EXACT:
            below = _below(x, bend[1])
            found *= 4 * tl.fma(-below, below, below)
        else:
            t = exp(-2 * tl.abs(x / bend[1]))
            found *= 4 * t / ((1 + t) * (1 + t))
    return found


@triton.jit
def quick_exponent(x, reference):
    """Return log2 of e^(x - reference) by one multiply-add.

    The rounding error of reference * log2(e) is the same in all terms of a row and cancels.
    """
    return tl.fma(x, LOG2E, -reference * LOG2E)


@triton.jit
def capped_exponent(z, bend, reference, way: tl.constexpr):
    """Return log2 of e^(x - reference) for a quick softcap, by one multiply-add after `_below`.

    `reference` is in units of log2, as a factor in the exponent makes it.
    """
    below = _below(z * bend[0] if way.scaled else z, bend[1])
    return tl.fma(below, bend[1] * (-2 * LOG2E), -(reference - bend[1] * LOG2E))


@triton.jit
def exponent(x, reference, EXACT: tl.constexpr):
    """Return log2 of e^(x - reference). It subtracts before it multiplies if EXACT, and for large references."""
    exact = (tl.abs(reference) >= FAR) | EXACT
    return tl.where(exact, (x - reference) * LOG2E, quick_exponent(x, reference))


@triton.jit
def rounding(m, EXACT: tl.constexpr):
    """Return by how much m log2(e) and its float32 rounding differ; 0 if `exponent` subtracts m first."""
    near = tl.where((tl.abs(m) >= FAR) | EXACT, 0.0, m)
    return tl.fma(near, LOG2E, -near * LOG2E)


@triton.jit
def finite(largest):
    """Return `largest`, or 0 if it is -inf, as the reference of exponents."""
    return tl.where(largest == -float("inf"), 0.0, largest)


@triton.jit
def log1p(r):
    """Return log(1 + r) as r log(w) / (w - 1) with w = 1 + r, in which the rounding error of w cancels."""
    w = 1 + r
    apart = (w != 1) & (w < 2)
    return tl.where(apart, tl.log(w) * (r / tl.where(apart, w - 1, 1.0)), tl.where(w == 1, r, tl.log(w)))


@triton.jit
def order(z, inside, bend, way: tl.constexpr):
    """Return a key with the order of x, computed from raw logits: scale and softcap preserve or reverse it.

    NaN is largest.
    """
    key = tl.where(bend[0] < 0, -z, tl.where(bend[0] == 0, 0.0, z)) if way.scaled else z
    return tl.where(inside, tl.where(z != z, float("inf"), key), -float("inf"))
