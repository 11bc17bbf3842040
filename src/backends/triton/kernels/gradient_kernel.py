"""The gradient of rows of logits in memory, from the coefficients of `finish_kernel`. One program per part of a row."""

import triton.language as tl

from xent.backends.triton.kernels.algebra import activation_of, row_at
from xent.backends.triton.kernels.finish_kernel import DEAD
from xent.backends.triton.kernels.gradient import write_gradient
from xent.backends.triton.kernels.memory import aligned, fill, offset
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
    way: tl.constexpr,  # see `Way`
    BLOCKS: tl.constexpr,  # number of blocks of a row that a program writes
):
    """Write the gradient of one part of one row."""
    SIZE: tl.constexpr = BLOCKS * way.block
    parts = tl.cdiv(width + (way.vector - 1 if way.skewed else 0), SIZE)
    here = (tl.program_id(0) // parts).to(tl.int64)
    first = tl.program_id(0) % parts * SIZE
    made = coefficients + here
    y = tl.load(made + 5 * slot).to(tl.int32, bitcast=True)
    off = offset(here, logits_inner, logits_outer, logits_row, skew, way)
    source = aligned(logits, here, logits_inner, logits_outer, logits_row, -off, way)
    place = aligned(grad, here, grad_inner, grad_outer, grad_row, -off, way)
    last = tl.minimum(first + SIZE - way.block, (width + off - 1) // way.block * way.block)
    if ((y == DEAD) | (first > last)) != 0:  # an aligned row may have one part less than a skewed row
        fill(place, 0.0, off, first, last, width, way)
    else:
        whole = (width + off + way.vector - 1) // way.vector * way.vector
        row = row_at(start + here, None, rows)
        softcap, logit_scale = activation_of(row, None, rows, softcap, logit_scale)
        bend = logit_scale if way.scaled else None, softcap if way.capped else None
        class_weight = rows.class_weight
        if class_weight is not None:
            class_weight += first_here
        tilt = 0.0
        if way.tilted:
            tilt = tl.load(made + 3 * slot)
        delta = 0.0
        if way.smoothed:
            delta = tl.load(made + 4 * slot)
        line = source, off, last, whole, width
        terms = tl.load(made), tl.load(made + slot), tilt, delta
        write_gradient(line, place, first, terms, class_weight, bend, way, False)
        y -= first_here
        if (y >= 0) & (y < width) & (y + off >= first) & (y + off < last + way.block):
            tl.debug_barrier()
            tl.store(place + (off + y), tl.load(made + 2 * slot).to(grad.dtype.element_ty))
