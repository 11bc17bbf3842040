"""Rows of logits with their activation, for kernels of one program per row.

A side is (row of raw logits, V, (logit scale or None, softcap or None)).
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import activation_of, gradient_factor, position, row_at, row_facts
from xent.backends.triton.kernels.maths import activate, slope

__all__ = ["HIDDEN", "begin", "fill_row", "peak", "read", "slope_of", "write", "x_of"]

HIDDEN = tl.constexpr(-2)  # the bits of a hidden logit as an integer: a NaN that no computation returns


@triton.jit
def begin(
    logits, inner, outer, stride, grad, grad_inner, grad_outer, grad_stride, rows, upstreams, start, vocabulary,
    softcap, logit_scale, ignore_index, limit, way: tl.constexpr,
):  # fmt: skip
    """Return the program, its row, the parts of its side, the row of the gradient, `row_facts`, `dead` and factor r.

    The row of the gradient is that of the logits if there is no gradient.
    """
    here = tl.program_id(0).to(tl.int64)
    row = row_at(start + here, None, rows)
    facts = row_facts(row, None, rows, ignore_index, limit)
    dead, r = gradient_factor(row, None, facts[1], facts[3], rows, upstreams)
    softcap, logit_scale = activation_of(row, None, rows, softcap, logit_scale)
    source = logits + position(here, inner, outer, stride, way.grouped)
    place = source if grad is None else grad + position(here, grad_inner, grad_outer, grad_stride, way.grouped)
    if not way.ragged:
        source, place = tl.multiple_of(source, 16), tl.multiple_of(place, 16)
        vocabulary = vocabulary // 8 * 8  # no change, but tells the compiler that it is a multiple of 8
    return here, row, source, vocabulary, logit_scale, softcap, place, facts, dead, r


@triton.jit
def x_of(z, side):
    """Return x of raw logits."""
    return activate(z, side[2], False)


@triton.jit
def slope_of(z, side):
    """Return dx/dz at raw logits."""
    return slope(z, side[2], False)


@triton.jit
def read(side, first, BLOCK: tl.constexpr, HIDES: tl.constexpr = False):
    """Return a block of raw logits and its x, which is -inf beyond the end of the row and, if HIDES, where HIDDEN."""
    classes = first + tl.arange(0, BLOCK)
    inside = classes < side[1]
    stored = tl.load(side[0] + classes, mask=inside, other=-float("inf"))
    z = stored.to(tl.float32)
    x = x_of(z, side)
    if HIDES:
        inside = inside & (stored.to(tl.int32 if stored.dtype == tl.float32 else tl.int16, bitcast=True) != HIDDEN)
    return z, tl.where(inside, x, -float("inf"))


@triton.jit
def peak(side, BLOCK: tl.constexpr, HIDES: tl.constexpr = False):
    """Return the largest x of a row, or 0 if it is -inf."""
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, side[1], BLOCK):
        _z, x = read(side, first, BLOCK, HIDES)
        best = tl.maximum(best, x)
    largest = tl.max(best, 0)
    return tl.where(largest == -float("inf"), 0.0, largest)


@triton.jit
def write(place, first, side, z, g, BLOCK: tl.constexpr):
    """Store the gradient of a block of raw logits from dl/dx.

    A gradient of another dtype may be the second half of the row of logits. Then that of a class is written over the
    logits of this class and later ones, when all threads have read them.
    """
    if place.dtype != side[0].dtype:
        tl.debug_barrier()
    classes = first + tl.arange(0, BLOCK)
    tl.store(place + classes, (g * slope_of(z, side)).to(place.dtype.element_ty), mask=classes < side[1])


@triton.jit
def fill_row(place, vocabulary, value, BLOCK: tl.constexpr):
    """Store one number to a row, when all threads have done what they did before."""
    tl.debug_barrier()
    for first in range(0, vocabulary, BLOCK):
        classes = first + tl.arange(0, BLOCK)
        values = tl.zeros([BLOCK], tl.float32) + value
        tl.store(place + classes, values.to(place.dtype.element_ty), mask=classes < vocabulary)
    tl.debug_barrier()
