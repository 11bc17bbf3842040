"""How a row lies in memory, and how kernels of whole rows read and write it: in whole vectors of 16 bytes.

A row may begin off a boundary (SKEWED). It is then read from the boundary before, `off` elements earlier.
"""

import triton
import triton.language as tl

__all__ = ["fetch", "fetch_if", "fill", "store"]


@triton.jit
def fetch(row, first, whole, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Return a block of a row as it is in memory, in the whole vectors that begin before `whole`; -inf elsewhere."""
    lanes = first + tl.arange(0, BLOCK)
    return tl.load(row + lanes, mask=lanes < whole, other=-float("inf"), eviction_policy=POLICY)


@triton.jit
def fetch_if(wanted, row, first, whole, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Return the same as `fetch` if the row is wanted, else -inf.

    The loads can start as soon as `wanted` is known, before a branch that depends on more.
    """
    lanes = first + tl.arange(0, BLOCK)
    return tl.load(row + lanes, mask=(lanes < whole) & wanted, other=-float("inf"), eviction_policy=POLICY)


@triton.jit
def store(
    row, first, g, skew, vocabulary,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write a block of a row: in whole vectors, and what is left of a RAGGED row element by element."""
    lanes = first + tl.arange(0, BLOCK)
    g = g.to(row.dtype.element_ty)
    if MASKED:
        begin = (skew + VECTOR - 1) // VECTOR * VECTOR if RAGGED else 0
        end = (vocabulary + skew) // VECTOR * VECTOR
        tl.store(row + lanes, g, mask=(lanes >= begin) & (lanes < end), cache_modifier=".cs")
        if RAGGED:
            edge = (lanes >= skew) & (lanes < vocabulary + skew) & ((lanes < begin) | (lanes >= end))
            tl.store(row + lanes, g, mask=edge, cache_modifier=".cs")
    else:
        tl.store(row + lanes, g, cache_modifier=".cs")


@triton.jit
def fill(row, value, off, start, last, vocabulary, BLOCK: tl.constexpr, RAGGED: tl.constexpr, VECTOR: tl.constexpr):
    """Write one number to a row's blocks from `start` on, the last of which begins at `last`."""
    for first in range(start, last + 1, BLOCK):
        store(row, first, tl.full([BLOCK], 0.0, tl.float32) + value, off, vocabulary, BLOCK, True, RAGGED, VECTOR)
