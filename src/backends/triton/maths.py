"""Arithmetic that the kernels share: the logits' activation and its slope, and a tanh that is right near 0."""

import triton
import triton.language as tl

__all__ = [
    "activate",
    "add_exponentials",
    "exp",
    "expm1",
    "in_lanes",
    "join_lanes",
    "log1p",
    "lowest_of_largest",
    "merge",
    "order",
    "tanh",
    "times",
    "with_target",
]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """Return e^x, 0 where it is too small for a normal float32: tl.exp takes three instructions more for those."""
    return tl.math.exp2(x * LOG2E)


@triton.jit
def tanh(u):
    """Return tanh(u), to a rounding or two: an odd polynomial where 1 - 2 / (exp(2u) + 1) would cancel.

    The polynomial is the best of its degree in relative error on [0, 0.625] (Lawson's iteration in float64).
    """
    size = tl.abs(u)
    small = tl.where(size < 0.625, u, 0.0)
    square = small * small
    series = -0.005704986397176981
    series = series * square + 0.02063908614218235
    series = series * square - 0.05373971536755562
    series = series * square + 0.13331441581249237
    series = series * square - 0.3333328068256378
    near = small + small * square * series
    far = 1 - 2 / (exp(2 * tl.where(size > 20, 20.0, size)) + 1)
    return tl.where(size < 0.625, near, tl.where(u < 0, -far, far))


@triton.jit
def expm1(u):
    """Return exp(u) - 1 without cancellation for u <= 0: (e - 1) u / log(e) forgives what e = exp(u) was rounded by."""
    e = tl.exp(u)
    apart = (e > 0.5) & (e != 1)
    near = (e - 1) * (u / tl.log(tl.where(apart, e, 0.75)))
    return tl.where(apart, near, tl.where(e == 1, u, e - 1))


@triton.jit
def times(share, value):
    """Return share * value; what has no share is 0, even where the value is infinite."""
    return share * tl.where(share == 0, 0.0, value)


@triton.jit
def activate(z, logit_scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """Return x = k tanh(s z / k), or s z without a softcap k, and its slope dx/dz."""
    x = z * logit_scale if SCALED else z
    slope = tl.zeros_like(z) + (logit_scale if SCALED else 1.0)
    if CAPPED:
        bent = tanh(x / softcap)
        x = softcap * bent
        slope *= 1 - bent * bent
    return x, slope


@triton.jit
def log1p(r):
    """Return log(1 + r): r log(w) / (w - 1) forgives what w = 1 + r was rounded by."""
    w = 1 + r
    apart = (w != 1) & (w < 2)
    return tl.where(apart, tl.log(w) * (r / tl.where(apart, w - 1, 1.0)), tl.where(w == 1, r, tl.log(w)))


@triton.jit
def order(z, inside, logit_scale):
    """Return what sorts logits as x does: scale and softcap keep their order or reverse it; NaN is the largest."""
    key = tl.where(logit_scale < 0, -z, tl.where(logit_scale == 0, 0.0, z))
    return tl.where(inside, tl.where(z != z, float("inf"), key), -float("inf"))


@triton.jit
def lowest_of_largest(best, at):
    """Return the largest of a block and the lowest of the classes `at` which have it."""
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, at, 2147483647), 0)


@triton.jit
def in_lanes(x, LANES: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a block as (LANES, n), so that a sum over its last axis stays within one thread.

    A thread holds neighbours where they are read together, ALIGNED, and else every so manieth element.
    """
    if ALIGNED:
        return tl.reshape(x, [LANES, x.shape[0] // LANES])
    else:
        return tl.trans(tl.reshape(x, [x.shape[0] // LANES, LANES]))


@triton.jit
def add_exponentials(peak, total, x):
    """Return the largest of `peak` and a block x, and the sum of exp(. - largest) over all so far.

    Lane by lane: `peak` and `total` are (LANES,), x is (LANES, n). Where nothing but -inf came yet, `total` is 0.
    """
    largest = tl.maximum(peak, tl.max(x, 1))
    # 0 stands in for a largest of -inf, so that exp(-inf - 0) is 0, and not exp(-inf + inf) NaN.
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    return largest, total * exp(peak - shift) + tl.sum(exp(x - shift[:, None]), 1)


@triton.jit
def merge(peak, total, other_peak, other_total):
    """Return (largest, sum of exponentials) of two such pairs together."""
    largest = tl.maximum(peak, other_peak)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    return largest, total * exp(peak - shift) + other_total * exp(other_peak - shift)


@triton.jit
def join_lanes(peak, total):
    """Return (largest, sum of exponentials) over all lanes."""
    largest = tl.max(peak, 0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    return largest, tl.sum(total * exp(peak - shift), 0)


@triton.jit
def with_target(peak, total, x_y):
    """Return the largest x and log sum_c exp(x_c - largest), from those of the other classes and the target's x.

    Where the target is the largest, p of it may be nearly 1, and then all others together are the row's gradient:
    they were summed without it, since beside its 1 they would be lost.
    """
    largest = tl.maximum(peak, x_y)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    others = total * exp(peak - shift)
    return largest, tl.where(x_y == largest, log1p(others), tl.log(others + exp(x_y - shift)))
