"""Kernels around the matrix products of a linear loss, the sums of all rows' results, and the scaling of gradients."""

import triton
import triton.language as tl

from xent.backends.triton.launch import kernel
from xent.backends.triton.row_algebra import inverse_of_few, position, row_facts

__all__ = ["scale_kernel", "sums_kernel", "take_kernel"]


@kernel
def take_kernel(
    hidden,  # (N, D)
    hidden_row: "i64",
    hidden_column: "i64",
    weight,  # (V, D) and its strides
    weight_row: "i64",
    weight_column: "i64",
    bias,  # (V,) or None
    bias_stride: "i64",
    taken,  # (R, D), contiguous; or None
    target_logits,  # (R,) float32; or None
    classes,  # (R,) int32, the targets; or None
    order,  # (N,) int64 or None
    start: "i64",
    target,
    sample_weight,
    class_weight,
    scratch,
    count: "i64",
    length: "i64",
    shift: "i64",
    ignore_index: "i64",
    vocabulary: "i32",
    size: "i32",  # D
    SHIFTED: tl.constexpr,
    MEAN: tl.constexpr,
    FEW: tl.constexpr,  # see `rows_kernel`
    STATISTICS: tl.constexpr,  # rows of weight 0 have gradients, from their statistics
    BLOCK: tl.constexpr,
):
    """Copy one row of hidden states, or zeros if the row has no gradient. Compute its target's logit in float32."""
    here = tl.program_id(0).to(tl.int64)
    row = start + here
    if order is not None:
        row = tl.load(order + row)
    y, a, _w, ignored, wrong = row_facts(
        row,
        row < count,
        target,
        sample_weight,
        class_weight,
        length,
        shift,
        ignore_index,
        vocabulary,
        SHIFTED,
        target is None,
    )
    if FEW > 0:
        inverse_of_few(scratch, here == 0, count, target, length, shift, ignore_index, vocabulary, SHIFTED, FEW)
    elif MEAN:
        a = tl.where(tl.load(scratch + 1) == 0, 0.0, a)
    dead = (a == 0) & ~wrong
    if STATISTICS:
        dead = ignored
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        columns = (first + tl.arange(0, BLOCK)).to(tl.int64)
        inside = columns < size
        h = tl.load(hidden + row * hidden_row + columns * hidden_column, mask=inside, other=0.0)
        if target_logits is not None:
            # Round to the dtype of the matrix product.
            rounded = (
                h.to(weight.dtype.element_ty).to(tl.float32)
                if taken is None
                else h.to(taken.dtype.element_ty).to(tl.float32)
            )
            w = tl.load(weight + y * weight_row + columns * weight_column, mask=inside, other=0.0)
            sums += rounded * w.to(tl.float32)
        if taken is not None:
            kept = h.to(taken.dtype.element_ty)
            zero = tl.zeros([BLOCK], taken.dtype.element_ty)
            tl.store(taken + here * size + columns, tl.where(dead, zero, kept), mask=inside)
    if target_logits is not None:
        z = tl.sum(sums, 0)
        if bias is not None:
            z += tl.load(bias + y * bias_stride).to(tl.float32)
        tl.store(target_logits + here, z)
    if classes is not None:
        tl.store(classes + here, y.to(tl.int32))


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
    loss,  # (N,)
    z_term,  # (N,) or None
    hits,  # (N,) or None
    scratch,  # D, or None
    counted,  # () int64 or None
    total_loss,  # () or None
    total_z,
    accuracy,
    count: "i64",
    BLOCK: tl.constexpr,
):
    """Reduce per-row results. Launched with one program."""
    if total_loss is not None:
        tl.store(total_loss, _reduced(loss, count, scratch, BLOCK))
    if total_z is not None:
        tl.store(total_z, _reduced(z_term, count, scratch, BLOCK))
    if accuracy is not None:
        found = _reduced(hits, count, None, BLOCK)
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
