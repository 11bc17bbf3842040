"""Arithmetic of the divergence kernels, in terms that are not negative and do not cancel.

With u = log o - log w, a divergence sum_c w (log w - log o) is computed as the sum of w (e^u - 1 - u) = o - w - w u, as
in `xent.backends.torch.portable.divergence`. Polynomials have the smallest relative error of their degree (Lawson's
iteration in float64).
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.maths import LOG2E, exp

__all__ = ["exact_exp", "gap", "is_near", "pulled", "sign"]

# ln 2 in two parts: the first has so few bits that its products with small integers are exact.
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.12194440e-4)
# e^-128 is 0 in float32.
FARTHEST = tl.constexpr(128.0)
FAR_APART = tl.constexpr(4.0)
# The bits of sqrt(1/2), of the exponent of a float32, and ln 2 for the lowest bit of the exponent.
ROOT_HALF = tl.constexpr(0x3F3504F3)
EXPONENT = tl.constexpr(-0x800000)
LN2_PER_BIT = tl.constexpr(0.6931471805599453 / 2**23)


@triton.jit
def exact_exp(x):
    """Return e^x for x < 88 with an error of one or two roundings for any x; 0 below e^-87.

    GPUs approximate 2^x to two units in the last place. The polynomial is for [-ln(2) / 2, ln(2) / 2].
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
    """Return e^u - 1 - u for -0.5 <= u <= 0.5 with the relative error of a rounding."""
    series = tl.fma(u, 0.0001987562891356906, 0.0013981997363968189)
    series = tl.fma(u, series, 0.008333452173482764)
    series = tl.fma(u, series, 0.04166579594172313)
    series = tl.fma(u, series, 0.16666665455830654)
    series = tl.fma(u, series, 0.5000000120139751)
    return u * u * series


@triton.jit
def gap(w, o, u):
    """Return w (e^u - 1 - u) for o = w e^u, and o if w is 0. If u is not small, it is o - w - w u."""
    found = tl.where(tl.abs(u) < 0.5, w * _excess(u), tl.fma(-w, u, o - w))
    return tl.where(w == 0, o, found)


@triton.jit
def _of_pair(a, small, large):
    """Return c, whether it is relative to o, and L, for two distributions w and o, a = log o - log w and their shares.

    m = large w + small o is their mixture. Relative to w, ::

        (small KL(o || m) + large KL(w || m)) per class = w c        M = m / w = 1 + s (e^u - 1)        L = log M
        c = s u e^u - M L        s = small        u = a

    If a > 4, c is relative to o and the roles are exchanged. For small u, terms of first order, which
    cancel, are left out: c = -(s (E - u) + (L - y) + y (L - u)) with E = e^u - 1 and y = s E.

    L is 2 atanh(z) with z = y / (2 + y), after factors of two are taken out of M. Without these, L - y is
    2 atanh(z) - 2 z - y z.
    """
    size = tl.abs(a)
    is_near, is_far, from_o = size < 0.5, size > FAR_APART, a > FAR_APART
    share = tl.where(from_o, large, small)
    u = tl.where(is_far, -size, a)
    excess, power_of_e = _excess(u), exp(u)
    y = share * tl.where(is_near, excess + u, power_of_e - 1)
    mixed = tl.where(is_far, tl.fma(share, power_of_e, tl.where(from_o, small, large)), 1 + y)
    bits = mixed.to(tl.int32, bitcast=True)
    power = (bits - ROOT_HALF) & EXPONENT
    rest = tl.where(power == 0, y, (bits - power).to(tl.float32, bitcast=True) - 1)
    z = rest / (2 + rest)
    t = z * z
    series = tl.fma(t, 0.14800638444364417, 0.19994150725256638)
    series = tl.fma(t, series, 0.33333343122002246)
    third = 2 * z * t * series
    log = tl.fma(power.to(tl.float32), LN2_PER_BIT, tl.fma(z, 2.0, third))
    near = tl.fma(share, excess, tl.fma(y, log - u, tl.fma(-y, z, third)))
    far = tl.fma(-share * power_of_e, u, mixed * log)
    return tl.maximum(-tl.where(is_near, near, far), 0.0), from_o, log


@triton.jit
def _mixture(apart, alpha, beta, FROM_P: tl.constexpr):
    """Return c, whether it is relative to p, and v = log m - log p, for m = alpha p + beta q and alpha = 1 - beta.

    `apart` is log q - log p. The sum of c p or c q is beta KL(q || m) + alpha KL(p || m). FROM_P: beta <= 0.5. Of p
    and q, the one with the larger share is the usual reference, so that terms do not cancel for shares near 0 or 1.
    c and v are finite for infinite `apart` and for NaN.
    """
    apart = tl.maximum(tl.where(apart < FARTHEST, apart, FARTHEST), -FARTHEST)
    if FROM_P:
        cost, from_q, log = _of_pair(apart, beta, alpha)
        from_p = from_q == 0
    else:
        cost, from_p, log = _of_pair(-apart, alpha, beta)
    return cost, from_p, tl.where(from_p, log, log + apart)


@triton.jit
def sign(x):
    """Return 1, -1, or 0 for 0 and NaN."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def pulled(apart, p, q, alpha, beta, FROM_P: tl.constexpr, VARIATION: tl.constexpr):
    """Return a class's term of the divergence and its v, for a gradient proportional to p_c (sum_k p_k v_k - v_c).

    v is log m - log p of a mixture m. VARIATION: of the total variation, it is sign(q - p) / 2.
    """
    if VARIATION:
        v = sign(apart) * 0.5
        cost = tl.where(v == 0, 0.0, tl.abs(p - q) * 0.5)
    else:
        cost, from_p, v = _mixture(apart, alpha, beta, FROM_P)
        cost *= tl.where(from_p, p, q)
    return cost, v


@triton.jit
def is_near(total):
    """Return whether a sum of exponentials is relative to a logit near the largest of all."""
    return (total >= 0.5) & (total < 1e8)
