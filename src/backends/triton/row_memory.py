"""Load and store blocks of whole rows in vectors of 16 bytes.

A row may begin at any address (SKEWED). It is then read from the last multiple of 16 bytes before it, `off` elements
earlier.
"""

import triton
import triton.language as tl

__all__ = ["edges", "fetch", "fetch_if", "fill", "store"]


@triton.jit
def fetch(row, first, whole, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Load a block of a row, in the whole vectors that begin before `whole`. Other elements are -inf."""
    lanes = first + tl.arange(0, BLOCK)
    return tl.load(row + lanes, mask=lanes < whole, other=-float("inf"), eviction_policy=POLICY)


@triton.jit
def fetch_if(wanted, row, first, whole, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Do the same as `fetch` if `wanted`, else return -inf.

    The loads can start as soon as `wanted` is known, before a branch that depends on more.
    """
    lanes = first + tl.arange(0, BLOCK)
    return tl.load(row + lanes, mask=(lanes < whole) & wanted, other=-float("inf"), eviction_policy=POLICY)


@triton.jit
def store(
    row, first, g, skew, vocabulary, BLOCK: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Store a block of a row in whole vectors. The partial vectors of a RAGGED row are left out, see `edges`."""
    lanes = first + tl.arange(0, BLOCK)
    g = g.to(row.dtype.element_ty)
    if MASKED:
        begin = (skew + VECTOR - 1) // VECTOR * VECTOR if RAGGED else 0
        end = (vocabulary + skew) // VECTOR * VECTOR
        tl.store(row + lanes, g, mask=(lanes >= begin) & (lanes < end), cache_modifier=".cs")
    else:
        tl.store(row + lanes, g, cache_modifier=".cs")


@triton.jit
def edges(start, stop, skew, vocabulary, VECTOR: tl.constexpr):
    """Return 2 VECTOR places of a RAGGED row, and which of them are in its partial vectors and in [start, stop).

    A row has at most two partial vectors, its first and its last.
    """
    k = tl.arange(0, 2 * VECTOR)
    begin = (skew + VECTOR - 1) // VECTOR * VECTOR
    end = (vocabulary + skew) // VECTOR * VECTOR
    places = tl.where(k < VECTOR, k, end + k - VECTOR)
    inside = (places >= skew) & (places < vocabulary + skew) & ((places < begin) | (places >= end))
    return places, inside & (places >= start) & (places < stop)


@triton.jit
def fill(row, value, off, start, last, vocabulary, BLOCK: tl.constexpr, RAGGED: tl.constexpr, VECTOR: tl.constexpr):
    """Store one number to a row's blocks from `start` to `last`."""
    for first in range(start, last + 1, BLOCK):
        store(row, first, tl.full([BLOCK], 0.0, tl.float32) + value, off, vocabulary, BLOCK, True, RAGGED, VECTOR)
    if RAGGED:
        places, inside = edges(start, last + BLOCK, off, vocabulary, VECTOR)
        few = tl.full([2 * VECTOR], 0.0, tl.float32) + value
        tl.store(row + places, few.to(row.dtype.element_ty), mask=inside)
