"""The second pass over a row, which writes its gradient; and its kernel for rows whose sums are finished already."""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import activation_of, row_at
from xent.backends.triton.kernels.maths import FLOOR, LOG2E, activate, capped_exponent, exponent, slope
from xent.backends.triton.kernels.memory import aligned, edges, fetch, fill, offset, shares_of, store
from xent.backends.triton.launches import kernel

__all__ = ["DEAD", "gradient_kernel", "write_gradient"]


DEAD = tl.constexpr(-2)  # the class of a row whose gradient is 0


@triton.jit
def _block(z, classes, vocabulary, terms, weights, bend, way: tl.constexpr, FOLDED: tl.constexpr):
    """Return the gradient of a block of raw logits; at the target it is wrong and must be overwritten.

    `terms` are m, factor, tilt, delta and gamma, see `finish`. With FOLDED, the factor is in the exponent: the first is
    log2(e) m - log2(factor), in units of log2.
    """
    reference, factor, tilt, delta, gamma = terms
    if FOLDED and (way.capped and way.quick):
        g = tl.math.exp2(capped_exponent(z, bend, reference, way))
    elif FOLDED:
        g = tl.math.exp2(tl.fma(activate(z, bend, way), LOG2E, -reference))
    else:
        e2 = exponent(activate(z, bend, way), reference, way.exact)
        g = tl.math.exp2(e2) * (tl.fma(tl.maximum(e2, FLOOR), tilt, factor) if way.tilted else factor)
    if way.smoothed:
        if weights[0] is not None or weights[1] is not None:
            q, share = shares_of(weights, classes, (classes >= 0) & (classes < vocabulary))
            g = tl.fma(share, -delta, g)
            if weights[1] is not None:
                g -= gamma * q
        else:
            g -= delta
    if way.capped or way.scaled:
        g *= slope(z, bend, way)
    return g


@triton.jit
def _write(
    place, z, first, off, vocabulary, terms, weights, bend, way: tl.constexpr, FOLDED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block."""
    classes = first + tl.arange(0, way.block) - off
    g = _block(z, classes, vocabulary, terms, weights, bend, way, FOLDED)
    store(place, first, g, off, vocabulary, way, MASKED)


@triton.jit
def write_gradient(
    line, place, start, terms, weights, bend, way: tl.constexpr, FOLDED: tl.constexpr
):  # fmt: skip
    """Write the gradient of a row's blocks from `start` to the last one, in which the target's is still wrong.

    It goes backwards from the end of the row, which is still in the caches if the row was just read. Each block is
    loaded while the previous one is computed. The last block is masked, and the first block of a skewed row. Partial
    vectors of a ragged row are written at the end.
    """
    BLOCK: tl.constexpr = way.block
    source, off, last, whole, vocabulary = line
    ahead = fetch(source, last, whole, way, "evict_first")
    if not way.whole:
        z = ahead
        ahead = fetch(source, tl.maximum(last - BLOCK, start), last, way, "evict_first")
        _write(place, z, last, off, vocabulary, terms, weights, bend, way, FOLDED, True)
    blocks = (last - start) // BLOCK + (1 if way.whole else 0)
    least = 1 if way.skewed else 0
    for back in range(least, blocks):
        first = start + (blocks - 1 - back + least) * BLOCK
        z = ahead
        ahead = fetch(source, tl.maximum(first - BLOCK, start), first, way, "evict_first")
        _write(place, z, first, off, vocabulary, terms, weights, bend, way, FOLDED, False)
    if way.skewed:
        if last > start:
            _write(place, ahead, start, off, vocabulary, terms, weights, bend, way, FOLDED, True)
    if way.ragged:
        places, inside = edges(start, last + BLOCK, off, vocabulary, way.vector)
        z = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
        g = _block(z, places - off, vocabulary, terms, weights, bend, way, FOLDED)
        tl.store(place + places, g.to(place.dtype.element_ty), mask=inside)


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
    coefficients,  # (6, R) float32 of `finish_kernel`, rows `slot` apart
    slot: "i64",
    rows,
    numbers,
    start: "i64",  # index of the first row in `rows.order`, or in the call
    first_here: "i32",  # the first class of the logits, relative to the rank's
    width: "i32",
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
        bend = activation_of(row, None, rows, numbers)
        shares = rows.class_weight, None
        if rows.class_weight is not None:
            shares = rows.class_weight + first_here, None
        tilt = 0.0
        if way.tilted:
            tilt = tl.load(made + 3 * slot)
        delta = 0.0
        if way.smoothed:
            delta = tl.load(made + 4 * slot)
        line = source, off, last, whole, width
        terms = tl.load(made), tl.load(made + slot), tilt, delta, 0.0
        write_gradient(line, place, first, terms, shares, bend, way, False)
        y -= first_here
        if (y >= 0) & (y < width) & (y + off >= first) & (y + off < last + way.block):
            tl.debug_barrier()
            tl.store(place + (off + y), tl.load(made + 2 * slot).to(grad.dtype.element_ty))
