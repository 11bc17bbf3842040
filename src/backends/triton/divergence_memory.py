"""Read blocks of rows for a divergence, and hide classes of a row from later reads.

A hidden logit is -inf. If -inf has a finite x, because of a softcap or a scale of 0, it is a NaN with certain bits.
"""

import triton
import triton.language as tl

from xent.backends.triton.maths import activate

__all__ = ["clear", "hide", "read"]

# Bits of NaNs that no computation returns.
_MARK_32 = tl.constexpr(0x7FC5A5A5)
_MARK_BF16 = tl.constexpr(0x7FE5)
_MARK_FP16 = tl.constexpr(0x7EA5)


@triton.jit
def _bits(values):
    """Return the bits of floating-point numbers as an integer of the same size."""
    if values.dtype == tl.float32:
        return values.to(tl.int32, bitcast=True)
    else:
        return values.to(tl.int16, bitcast=True)


@triton.jit
def _mark(dtype: tl.constexpr):
    """Return the bits of a hidden logit."""
    if dtype == tl.float32:
        return _MARK_32
    elif dtype == tl.bfloat16:
        return _MARK_BF16
    else:
        return _MARK_FP16


@triton.jit
def clear(loss, row, vocabulary, BLOCK: tl.constexpr, WRITES: tl.constexpr):
    """Store a loss of 0, and if WRITES zeros to a row of the gradient."""
    tl.store(loss, 0.0)
    if WRITES:
        lanes = tl.arange(0, BLOCK)
        for first in range(0, vocabulary, BLOCK):
            nothing = tl.zeros([BLOCK], tl.float32).to(row.dtype.element_ty)
            tl.store(row + first + lanes, nothing, mask=first + lanes < vocabulary)


@triton.jit
def hide(row, ids, known, WIDTH: tl.constexpr, MARKED: tl.constexpr):
    """Overwrite the logits of the `known` of WIDTH classes, when all threads have read them."""
    dtype: tl.constexpr = row.dtype.element_ty
    if MARKED:
        if dtype == tl.float32:
            hidden = tl.full([WIDTH], _mark(dtype), tl.int32).to(dtype, bitcast=True)
        else:
            hidden = tl.full([WIDTH], _mark(dtype), tl.int16).to(dtype, bitcast=True)
    else:
        hidden = tl.full([WIDTH], -float("inf"), tl.float32).to(dtype)
    tl.debug_barrier()
    tl.store(row + ids, hidden, mask=known)
    tl.debug_barrier()


@triton.jit
def read(
    row, first, vocabulary, logit_scale, softcap,
    BLOCK: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """Return a block of raw logits and its x, which is -inf beyond the end of the row and, if HIDES, where hidden."""
    classes = first + tl.arange(0, BLOCK)
    inside = classes < vocabulary
    stored = tl.load(row + classes, mask=inside, other=-float("inf"))
    z = stored.to(tl.float32)
    x = activate(z, logit_scale, softcap, SCALED, CAPPED, False)
    if SCALED or CAPPED:
        if HIDES:
            inside = inside & (_bits(stored) != _mark(stored.dtype))
        x = tl.where(inside, x, -float("inf"))
    return z, x
