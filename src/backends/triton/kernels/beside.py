"""Kernels beside those of logits: the divisor of a mean, hidden states, the scale of gradients."""

import triton.language as tl

from xent.backends.triton.kernels.algebra import position, row_at, row_facts, target_weight
from xent.backends.triton.launches import kernel

__all__ = ["divisor_kernel", "scale_kernel", "take_kernel"]


@kernel
def divisor_kernel(
    rows,  # without a divisor
    row_weight,  # (N,) float32: the class weights of the targets, of a vocabulary in shards; or None
    normalizer,  # (): the divisor; None for the sum of the row weights
    divisor,  # see `Rows.divisor`
    counted,  # () int64: number of rows with a target; or None
    count: "i64",
    ignore_index: "i64",
    limit: "i64",
    NARROW: tl.constexpr,  # gradients of the forward pass are float16
    WEIGHTED: tl.constexpr,  # rows count with the class weights of their targets
    BLOCK: tl.constexpr,
):
    """Compute the divisor and the count. One program sums all rows in a fixed order."""
    sums = tl.zeros([BLOCK], tl.float32)
    sizes = tl.zeros([BLOCK], tl.float32)
    rows_counted = tl.zeros([BLOCK], tl.int64)
    for first in range(0, count, BLOCK):
        row = first + tl.arange(0, BLOCK)
        y, weighted, ignored, wrong = row_facts(row, row < count, rows, ignore_index, limit)
        if WEIGHTED:
            weighted *= target_weight(rows, y)
        if row_weight is not None:
            weighted *= tl.load(row_weight + row, mask=row < count, other=0.0)
        sums += tl.where(wrong, 0.0, weighted)
        size = tl.abs(weighted)
        sizes = tl.maximum(sizes, tl.where(wrong | (size != size), 0.0, tl.minimum(size, 3.4e38)))
        rows_counted += tl.where(ignored, 0, 1)
    d = tl.sum(sums, 0)
    if normalizer is not None:
        d = tl.load(normalizer).to(tl.float32)
    of_rows = d
    rest = tl.full((), 1.0, tl.float32)
    if NARROW:
        # In float16, gradients divided by D could underflow before a loss scale is applied, and weights could make
        # them overflow. So gradients are stored with row factors of at most 1, and `rest` is the remaining factor.
        largest = tl.max(sizes, 0)
        largest = tl.where(largest == 0, 1.0, largest)
        rest = tl.where(d == 0, 0.0, tl.div_rn(largest, tl.where(d == 0, 1.0, d)))
        of_rows = tl.where(d == 0, 0.0, largest)
    tl.store(divisor, d)
    tl.store(divisor + 1, of_rows)
    tl.store(divisor + 2, rest)
    if counted is not None:
        tl.store(counted, tl.sum(rows_counted, 0))


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


@kernel
def scale_kernel(
    grad,  # rows at position(row, inner, outer_stride, row_stride)
    inner: "i64",
    outer_stride: "i64",
    row_stride: "i64",
    upstream,  # ()
    deferred,  # () or None
    rows: "i64",
    length: "i64",  # elements of a row
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply a gradient by factors and round once; do nothing if the product of the factors is 1."""
    blocks = tl.cdiv(length, BLOCK)
    factor = tl.load(upstream).to(tl.float32)
    if deferred is not None:
        factor *= tl.load(deferred)
    if factor != 1:
        for block in range(tl.program_id(0).to(tl.int64), rows * blocks, tl.num_programs(0)):
            begin = position(block // blocks, inner, outer_stride, row_stride, GROUPED)
            places = block % blocks * BLOCK + tl.arange(0, BLOCK)
            inside = places < length
            scaled = tl.load(grad + begin + places, mask=inside, other=0.0).to(tl.float32) * factor
            tl.store(grad + begin + places, scaled.to(grad.dtype.element_ty), mask=inside)
