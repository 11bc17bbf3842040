"""Kernels beside the logits: hidden states and target logits, the sums of all rows' results, the scale of gradients."""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import position, row_at, row_facts
from xent.backends.triton.prepared import kernel

__all__ = ["scale_kernel", "sums_kernel", "take_kernel"]


@kernel
def take_kernel(
    hidden,  # (N, D)
    hidden_row: "i64",
    hidden_column: "i64",
    weight,  # (C, D) and its strides
    weight_row: "i64",
    weight_column: "i64",
    bias,  # (C,) or None
    bias_stride: "i64",
    taken,  # (R, D), contiguous; or None
    target_logits,  # (R,) float32, 0 for the targets of other ranks; or None
    rows,
    start: "i64",
    ignore_index: "i64",
    limit: "i64",
    first_class: "i64",
    width: "i64",  # C
    size: "i32",  # D
    STATISTICS: tl.constexpr,  # rows of weight 0 have gradients, from their statistics
    BLOCK: tl.constexpr,
):
    """Copy one row of hidden states, or zeros if the row has no gradient. Compute its target's logit in float32."""
    here = tl.program_id(0).to(tl.int64)
    row = row_at(start + here, None, rows)
    y, a, ignored, wrong = row_facts(row, None, rows, ignore_index, limit)
    y -= first_class
    if rows.divisor is not None:
        a = tl.where(tl.load(rows.divisor + 1) == 0, 0.0, a)
    dead = (a == 0) & ~wrong
    if STATISTICS:
        dead = ignored
    owned = (y >= 0) & (y < width)
    own_size = tl.where(owned, size, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        columns = (first + tl.arange(0, BLOCK)).to(tl.int64)
        h = tl.load(hidden + row * hidden_row + columns * hidden_column, mask=columns < size, other=0.0)
        if target_logits is not None:
            # Round to the dtype of the matrix product.
            rounded = h.to(weight.dtype.element_ty).to(tl.float32)
            w = tl.load(weight + y * weight_row + columns * weight_column, mask=columns < own_size, other=0.0)
            sums += tl.where(columns < own_size, rounded * w.to(tl.float32), 0.0)
        if taken is not None:
            zero = tl.zeros([BLOCK], taken.dtype.element_ty)
            kept = tl.where(dead, zero, h.to(taken.dtype.element_ty))
            tl.store(taken + here * size + columns, kept, mask=columns < size)
    if target_logits is not None:
        z = tl.sum(sums, 0)
        if bias is not None:
            z += tl.load(bias + y * bias_stride, mask=owned, other=0.0).to(tl.float32)
        tl.store(target_logits + here, z)


@triton.jit
def _reduced(values, count, divisor, BLOCK: tl.constexpr):
    """Return the sum of values (count,), divided by `divisor` unless it is None; 0 if the divisor is 0."""
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        sums += tl.load(values + rows, mask=rows < count, other=0.0)
    found = tl.sum(sums, 0)
    if divisor is not None:
        d = tl.load(divisor)
        found = tl.where(d == 0, 0.0, tl.div_rn(found, tl.where(d == 0, 1.0, d)))
    return found


@kernel
def sums_kernel(
    results,
    divisor,  # D, or None
    counted,  # () int64 or None
    total_loss,  # () or None
    total_z,
    accuracy,
    count: "i64",
    BLOCK: tl.constexpr,
):
    """Reduce per-row results. Launched with one program."""
    if total_loss is not None:
        tl.store(total_loss, _reduced(results.loss, count, divisor, BLOCK))
    if total_z is not None:
        tl.store(total_z, _reduced(results.z_term, count, divisor, BLOCK))
    if accuracy is not None:
        found = _reduced(results.hits, count, None, BLOCK)
        rows = tl.maximum(tl.load(counted), 1).to(tl.float32)
        tl.store(accuracy, tl.div_rn(found, rows))


@kernel
def scale_kernel(
    grad,  # rows at position(row, inner, outer_stride, row_stride), or one row that is all memory
    inner: "i64",
    outer_stride: "i64",
    row_stride: "i64",
    out,  # like `grad`; may be the same tensor
    other,  # a second gradient, without gaps, which is overwritten; or None
    upstream,  # ()
    deferred,  # () or None
    rows: "i64",
    length: "i64",  # elements of a row
    count: "i64",  # elements of `other`
    GROUPED: tl.constexpr,
    INPLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply gradients by factors and round once. INPLACE: do nothing if the product of the factors is 1."""
    blocks = tl.cdiv(length, BLOCK)
    factor = tl.load(upstream).to(tl.float32)
    if deferred is not None:
        factor *= tl.load(deferred)
    if (factor != 1) | (not INPLACE):
        for block in range(tl.program_id(0).to(tl.int64), rows * blocks, tl.num_programs(0)):
            begin = position(block // blocks, inner, outer_stride, row_stride, GROUPED)
            places = block % blocks * BLOCK + tl.arange(0, BLOCK)
            inside = places < length
            scaled = tl.load(grad + begin + places, mask=inside, other=0.0).to(tl.float32) * factor
            tl.store(out + begin + places, scaled.to(out.dtype.element_ty), mask=inside)
        if other is not None:
            for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(count, BLOCK), tl.num_programs(0)):
                places = block * BLOCK + tl.arange(0, BLOCK)
                scaled = tl.load(other + places, mask=places < count, other=0.0).to(tl.float32) * factor
                tl.store(other + places, scaled.to(other.dtype.element_ty), mask=places < count)
