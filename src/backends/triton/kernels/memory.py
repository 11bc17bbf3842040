"""Load and store blocks of whole rows in vectors of 16 bytes.

A row may begin at any address (`Way.skewed`). It is then read from the last multiple of 16 bytes before it, `off`
elements earlier.

Vectors of 16-bit elements are loaded as pairs, the first in the low half of an int32: widening both to float32 takes
one instruction each. Blocks that are loaded ahead are float32 too. If they were kept as pairs, the compiler would load
them into the registers of the block before, and so not before that block is used.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import position

__all__ = ["aligned", "edges", "fetch", "fill", "offset", "store"]

NO_BFLOAT16 = tl.constexpr(-0x007F0080)  # a pair of -inf
NO_FLOAT16 = tl.constexpr(-0x03FF0400)
HIGH = tl.constexpr(-0x10000)  # the bits of a pair's second element


@triton.jit
def offset(here, inner, outer, stride, skew, way: tl.constexpr):
    """Return the distance of a row from the last multiple of 16 bytes before it, in elements."""
    off = 0
    if way.skewed:
        off = ((skew + position(here, inner, outer, stride, way.grouped)) % way.vector).to(tl.int32)
    return off


@triton.jit
def aligned(tensor, here, inner, outer, stride, shift, way: tl.constexpr):
    """Return a pointer `shift` elements after the begin of a row: a multiple of 16 bytes, if there are vectors."""
    place = tensor + (position(here, inner, outer, stride, way.grouped) + shift)
    return tl.multiple_of(place, 16) if way.vector > 1 else place


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
def store(row, first, g, skew, vocabulary, way: tl.constexpr, MASKED: tl.constexpr):
    """Store a block of a row in whole vectors. The partial vectors of a ragged row are left out, see `edges`."""
    lanes = tl.arange(0, way.block)
    g = g.to(row.dtype.element_ty)
    if MASKED:
        begin = (skew + way.vector - 1) // way.vector * way.vector if way.ragged else 0
        end = (vocabulary + skew) // way.vector * way.vector
        tl.store(row + first + lanes, g, mask=(lanes >= begin - first) & (lanes < end - first), cache_modifier=".cs")
    else:
        tl.store(row + first + lanes, g, cache_modifier=".cs")


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


@triton.jit
def fill(row, value, off, start, last, vocabulary, way: tl.constexpr):
    """Store one number to a row's blocks from `start` to `last`."""
    BLOCK: tl.constexpr = way.block
    VECTOR: tl.constexpr = way.vector
    for first in range(start, last + 1, BLOCK):
        store(row, first, tl.full([BLOCK], 0.0, tl.float32) + value, off, vocabulary, way, True)
    if way.ragged:
        places, inside = edges(start, last + BLOCK, off, vocabulary, VECTOR)
        few = tl.full([2 * VECTOR], 0.0, tl.float32) + value
        tl.store(row + places, few.to(row.dtype.element_ty), mask=inside)
