"""Load and store blocks of whole rows in vectors of 16 bytes.

A row may begin at any address (`Way.skewed`). It is then read from the last multiple of 16 bytes before it, `off`
elements earlier.

Vectors of 16-bit elements are loaded as pairs, the first in the low half of an int32: widening both to float32 takes
one instruction each. Blocks that are loaded ahead are float32 too. If they were kept as pairs, the compiler would load
them into the registers of the block before, and so not before that block is used.

Kernels of supports and divergences, with one program per row, read and write sides in simple blocks. A side is (row of
raw logits, V, (logit scale, softcap)).
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import (
    activate,
    activation_of,
    gradient_factor,
    position,
    row_at,
    row_facts,
    slope,
)

__all__ = [
    "HIDDEN",
    "begin",
    "edges",
    "fetch",
    "fill",
    "line_of",
    "peak",
    "read",
    "shares_of",
    "store",
    "write",
]

NO_BFLOAT16 = tl.constexpr(-0x007F0080)  # a pair of -inf
NO_FLOAT16 = tl.constexpr(-0x03FF0400)
HIGH = tl.constexpr(-0x10000)  # the bits of a pair's second element


@triton.jit
def line_of(tensor, here, inner, outer, stride, skew, cut, size, way: tl.constexpr):
    """Return a row's `size` classes from `cut` on, as kernels of vectors have it.

    These are a pointer to a multiple of 16 bytes, if there are vectors; the first class's distance from it in elements;
    where the last block begins and where the last vector ends, counted from the pointer; and `size`.
    """
    start = position(here, inner, outer, stride, way.grouped)
    off = 0
    if way.skewed:
        off = ((skew + start) % way.vector).to(tl.int32)
    row = tensor + (start + (cut - off))
    row = tl.multiple_of(row, 16) if way.vector > 1 else row
    whole = (size + tl.where(size > 0, off, 0) + way.vector - 1) // way.vector * way.vector  # 0 if there is no class
    return row, off, (size + off - 1) // way.block * way.block, whole, size


@triton.jit
def fetch(row, first, whole, way: tl.constexpr, POLICY: tl.constexpr):
    """Load a block of a row as float32, in the whole vectors that begin before `whole`. Other elements are -inf."""
    BLOCK: tl.constexpr = way.block
    if way.vector == 8:  # 16-bit elements
        NOTHING: tl.constexpr = NO_BFLOAT16 if row.dtype.element_ty == tl.bfloat16 else NO_FLOAT16
        pairs = tl.multiple_of(row.to(tl.pointer_type(tl.int32)), 16) + first // 2
        lanes = tl.arange(0, BLOCK // 2)
        found = tl.load(pairs + lanes, mask=lanes < (whole - first) // 2, other=NOTHING, eviction_policy=POLICY)
        if row.dtype.element_ty == tl.bfloat16:
            low = (found << 16).to(tl.float32, bitcast=True)
            high = (found & HIGH).to(tl.float32, bitcast=True)
        else:
            low = found.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (found >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), [BLOCK])
    else:
        lanes = tl.arange(0, BLOCK)
        mask = lanes < whole - first
        return tl.load(row + first + lanes, mask=mask, other=-float("inf"), eviction_policy=POLICY).to(tl.float32)


@triton.jit
def store(row, first, g, skew, vocabulary, way: tl.constexpr):
    """Store a block of a row in whole vectors. The partial vectors of a ragged row are left out, see `edges`."""
    lanes = tl.arange(0, way.block)
    inside = lanes < (vocabulary + skew) // way.vector * way.vector - first
    if way.ragged:
        inside = inside & (lanes >= (skew + way.vector - 1) // way.vector * way.vector - first)
    tl.store(row + first + lanes, g.to(row.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit
def shares_of(weights, classes, inside):
    """Return q and w ((1-e) q + e/V) of classes with probabilities; w twice without.

    `weights` are the class weights or None, and the probabilities of a row or None, their stride, 1-e and e/V.
    """
    share = 1.0 if weights[0] is None else tl.load(weights[0] + classes, mask=inside, other=0.0)
    q = share
    if weights[1] is not None:
        q = tl.load(weights[1] + classes.to(tl.int64) * weights[2], mask=inside, other=0.0).to(tl.float32)
        share = tl.where(inside, (weights[3] * q + weights[4]) * share, 0.0)
    return q, share


@triton.jit
def edges(start, stop, skew, vocabulary, VECTOR: tl.constexpr):
    """Return 2 VECTOR places of a ragged row, and which of them are in its partial vectors and in [start, stop).

    A row has at most two partial vectors, its first and its last.
    """
    k = tl.arange(0, 2 * VECTOR)
    begin = (skew + VECTOR - 1) // VECTOR * VECTOR
    end = (vocabulary + skew) // VECTOR * VECTOR
    places = tl.where(k < VECTOR, k, end + k - VECTOR)
    inside = (places >= skew) & (places < vocabulary + skew) & ((places < begin) | (places >= end))
    return places, inside & (places >= start) & (places < stop)


HIDDEN = tl.constexpr(-2)  # the bits of a hidden logit as an integer: a NaN that no computation returns


@triton.jit
def begin(
    logits, inner, outer, stride, grad, grad_inner, grad_outer, grad_stride, rows, upstreams, numbers, start,
    vocabulary, ignore_index, limit, way: tl.constexpr,
):  # fmt: skip
    """Return the program, its row, its side, the row of the gradient, `row_facts`, `dead` and factor r.

    The row of the gradient is that of the logits if there is no gradient.
    """
    here = tl.program_id(0).to(tl.int64)
    row = row_at(start + here, None, rows)
    facts = row_facts(row, None, rows, ignore_index, limit)
    dead, r = gradient_factor(row, None, facts[1], facts[3], rows, upstreams)
    source = logits + position(here, inner, outer, stride, way.grouped)
    place = source if grad is None else grad + position(here, grad_inner, grad_outer, grad_stride, way.grouped)
    if not way.ragged:
        source, place = tl.multiple_of(source, 16), tl.multiple_of(place, 16)
        vocabulary = vocabulary // 8 * 8  # no change, but tells the compiler that it is a multiple of 8
    return here, row, (source, vocabulary, activation_of(row, None, rows, numbers)), place, facts, dead, r


@triton.jit
def read(side, first, way: tl.constexpr, HIDES: tl.constexpr = False):
    """Return a block of raw logits and its x, which is -inf beyond the end of the row and, if HIDES, where HIDDEN."""
    classes = first + tl.arange(0, way.block)
    inside = classes < side[1]
    stored = tl.load(side[0] + classes, mask=inside, other=-float("inf"))
    z = stored.to(tl.float32)
    x = activate(z, side[2], way)
    if HIDES:
        inside = inside & (stored.to(tl.int32 if stored.dtype == tl.float32 else tl.int16, bitcast=True) != HIDDEN)
    return z, tl.where(inside, x, -float("inf"))


@triton.jit
def peak(side, way: tl.constexpr, HIDES: tl.constexpr = False):
    """Return the largest x of a row, or 0 if it is -inf."""
    BLOCK: tl.constexpr = way.block
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, side[1], BLOCK):
        _z, x = read(side, first, way, HIDES)
        best = tl.maximum(best, x)
    largest = tl.max(best, 0)
    return tl.where(largest == -float("inf"), 0.0, largest)


@triton.jit
def write(place, first, side, z, g, way: tl.constexpr):
    """Store the gradient of a block of raw logits from dl/dx.

    A gradient of another dtype may be the second half of the row of logits. Then that of a class is written over the
    logits of this class and later ones, when all threads have read them.
    """
    if place.dtype != side[0].dtype:
        tl.debug_barrier()
    classes = first + tl.arange(0, way.block)
    tl.store(place + classes, (g * slope(z, side[2], way)).to(place.dtype.element_ty), mask=classes < side[1])


@triton.jit
def fill(row, value, start, stop, way: tl.constexpr):
    """Store one number to classes [start, stop) of a row, when all threads have done what they did before."""
    BLOCK: tl.constexpr = way.block
    if not way.ragged:
        stop = stop // way.vector * way.vector  # no change, but tells the compiler that it is a multiple
    tl.debug_barrier()
    for first in range(start, stop, BLOCK):
        classes = first + tl.arange(0, BLOCK)
        values = tl.zeros([BLOCK], tl.float32) + value
        tl.store(row + classes, values.to(row.dtype.element_ty), mask=classes < stop, cache_modifier=".cs")
    tl.debug_barrier()
