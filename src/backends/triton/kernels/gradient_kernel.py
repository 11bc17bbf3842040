"""The gradient of rows of logits in memory, from the coefficients of `finish_kernel`. One program per part of a row."""

import triton.language as tl

from xent.backends.triton.kernels.algebra import activation_of, position
from xent.backends.triton.kernels.finish_kernel import DEAD
from xent.backends.triton.kernels.gradient import write_gradient
from xent.backends.triton.kernels.memory import fill
from xent.backends.triton.prepared import kernel

__all__ = ["gradient_kernel"]


@kernel
def gradient_kernel(
    logits,  # rows at position(row, inner, outer, stride)
    logits_inner: "i64",
    logits_outer: "i64",
    logits_row: "i64",
    skew: "i64",  # offset of `logits` from a multiple of 16 bytes, in elements
    grad,  # may be the logits; aligned like them
    grad_inner: "i64",
    grad_outer: "i64",
    grad_row: "i64",
    coefficients,  # (6, R) float32, rows `slot` apart
    slot: "i64",
    rows,
    start: "i64",  # index of the first row in `rows.order`, or in the call
    first_here: "i32",  # the first class of the logits, relative to the rank's
    width: "i32",
    softcap: "fp32",
    logit_scale: "fp32",
    GROUPED: tl.constexpr,  # these are described in `rows_kernel`
    SKEWED: tl.constexpr,
    RAGGED: tl.constexpr,
    VECTOR: tl.constexpr,
    QUICK: tl.constexpr,
    SMOOTHED: tl.constexpr,
    TILTED: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # number of blocks of a row that a program writes
):
    """Write the gradient of one part of one row."""
    parts = tl.cdiv(width + (VECTOR - 1 if SKEWED else 0), BLOCKS * BLOCK)
    here = (tl.program_id(0) // parts).to(tl.int64)
    first = tl.program_id(0) % parts * (BLOCKS * BLOCK)
    made = coefficients + here
    y = tl.load(made + 5 * slot).to(tl.int32, bitcast=True)
    begin = position(here, logits_inner, logits_outer, logits_row, GROUPED)
    off = 0
    if SKEWED:
        off = ((skew + begin) % VECTOR).to(tl.int32)
    source = tl.multiple_of(logits + (begin - off), 16) if VECTOR > 1 else logits + begin
    place = grad + (position(here, grad_inner, grad_outer, grad_row, GROUPED) - off)
    if VECTOR > 1:
        place = tl.multiple_of(place, 16)
    last = tl.minimum(first + (BLOCKS - 1) * BLOCK, (width + off - 1) // BLOCK * BLOCK)
    if ((y == DEAD) | (first > last)) != 0:  # an aligned row may have one part less than a skewed row
        fill(place, 0.0, off, first, last, width, BLOCK, RAGGED, VECTOR)
    else:
        whole = (width + off + VECTOR - 1) // VECTOR * VECTOR
        row = start + here
        if rows.order is not None:
            row = tl.load(rows.order + row)
        softcap, logit_scale = activation_of(row, None, rows, softcap, logit_scale)
        class_weight = rows.class_weight
        if class_weight is not None:
            class_weight += first_here
        tilt = 0.0
        if TILTED:
            tilt = tl.load(made + 3 * slot)
        delta = 0.0
        if SMOOTHED:
            delta = tl.load(made + 4 * slot)
        write_gradient(
            source, place, off, first, last, width, whole, tl.load(made), True, tl.load(made + slot), tilt, delta,
            class_weight, logit_scale, softcap, BLOCK, RAGGED, VECTOR, SKEWED, False, True, QUICK, SCALED, CAPPED,
            SMOOTHED, TILTED, False,
        )  # fmt: skip
        y -= first_here
        if (y >= 0) & (y < width) & (y + off >= first) & (y + off < last + BLOCK):
            tl.debug_barrier()
            tl.store(place + (off + y), tl.load(made + 2 * slot).to(grad.dtype.element_ty))
