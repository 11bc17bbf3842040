"""The exchange between programs that share a row: each adds up a part of the classes, and needs the sums of the row.

The sums are those of `fold`. Each program publishes its own as 64-bit words, a tag and a float32 in one word, and
reads the words of the other programs until all have tags. So no order of memory accesses is assumed between words. The
sums of a part are relative to its own reference, those of the row to the largest reference.

A program that waits stays on its multiprocessor, so programs must not wait for others that may start after they end.
A program's number is therefore not that of the launch, but counts the programs that started before it (`numbered`).
Programs of a row have adjacent numbers. So only the row that was started last can have programs that have not started,
and at most PARTS - 1 programs wait for them. A launch finishes if the GPU can hold PARTS of its programs at a time,
also while other launches run.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.maths import LOG2E, NOWHERE, finite, rounding, times

__all__ = ["BOTH", "GRADIENTS", "SUMS", "WORDS", "exchanged", "numbered"]

WORDS = 8
"""The words of a program: m, others, mixed, squares, level, largest key, target's raw logit, predicted class."""

# BOTH: one launch, in which programs wait for each other. Triton's interpreter runs programs one after the other, so it
# takes two launches. SUMS publishes the sums of all parts. GRADIENTS computes those of its part again, reads the others
# without waiting, and writes results and gradient.
BOTH, SUMS, GRADIENTS = 0, 1, 2

_WORDS = tl.constexpr(WORDS)
_BOTH = tl.constexpr(BOTH)
_TAG = tl.constexpr(1 << 32)


@triton.jit
def numbered(counter, PHASE: tl.constexpr):
    """Return the number of this program in the order in which programs start."""
    if PHASE == _BOTH:
        return tl.atomic_add(counter, 1, sem="relaxed").to(tl.int32)
    else:
        return tl.program_id(0)


@triton.jit
def _of_parts(values, index: tl.constexpr):
    """Return one value of each part, (PARTS,), from those of all (PARTS, WORDS)."""
    return tl.sum(tl.where(tl.arange(0, _WORDS)[None, :] == index, values, 0), 1)


@triton.jit
def exchanged(
    words, part, has_target, z_y, x_y, m, others, mixed, squares, level, top, found,
    way: tl.constexpr,
):  # fmt: skip
    """Return the target's raw logit, the row's m, and the sums of the row, from those of a part.

    `words` (parts, WORDS) belongs to the row. The part's sums do not contain the target, but m may be its x. Only the
    part that has the target knows `z_y`: the gradient may overwrite it before other programs could load it.
    """
    PARTS: tl.constexpr = way.parts
    possible = (others != 0) | (has_target & (x_y != -float("inf")))
    m = tl.where(possible, m, -float("inf"))
    k = tl.arange(0, _WORDS)
    own = tl.where(k == 0, m, tl.where(k == 1, others, tl.where(k == 2, mixed, tl.where(k == 3, squares, level))))
    own = tl.where(k == 5, top, tl.where(k == 6, tl.where(has_target, z_y, 0.0), own))
    bits = own.to(tl.int32, bitcast=True)
    bits = tl.where(k == 7, found, bits)
    word = _TAG + (bits.to(tl.int64) & 0xFFFFFFFF)
    tl.atomic_xchg(words + part * _WORDS + k, word, sem="relaxed")
    places = words + tl.arange(0, PARTS * _WORDS)
    if way.phase == _BOTH:
        while tl.min((tl.load(places, volatile=True) >> 32).to(tl.int32), 0) == 0:
            pass
    # Again, because each warp reads for itself: some may have left the loop with words from before they were written.
    all_bits = tl.reshape(tl.load(places, volatile=True).to(tl.int32), [PARTS, _WORDS])
    values = all_bits.to(tl.float32, bitcast=True)
    each_m = _of_parts(values, 0)
    m = finite(tl.max(each_m, 0))
    # Exponents of a part are relative to its m. If its m was multiplied by log2(e) first, they contain that rounding.
    change = (each_m - m) * LOG2E + rounding(m, way.exact) - rounding(each_m, way.exact)
    factor = tl.math.exp2(change)
    each = _of_parts(values, 1)
    others = tl.sum(times(factor, each), 0)
    mixed = tl.sum(times(factor, _of_parts(values, 2) + times(each, change)), 0)
    squares = tl.sum(times(factor * factor, _of_parts(values, 3)), 0)
    level = tl.sum(_of_parts(values, 4), 0)
    each_top = _of_parts(values, 5)
    top = tl.max(each_top, 0)
    found = tl.min(tl.where(each_top == top, _of_parts(all_bits, 7), NOWHERE), 0)
    return tl.sum(_of_parts(values, 6), 0), m, others, mixed, squares, level, found
