"""Kernels that run before the logits exist: the divisor of a mean, and the order in which rows are computed."""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import row_facts, target_weight
from xent.backends.triton.prepared import kernel

__all__ = ["divisor_kernel", "partition_kernel"]


@kernel
def divisor_kernel(
    rows,  # without a divisor
    row_weight,  # (N,) float32: the class weights of the targets, of a vocabulary in shards; or None
    normalizer,  # () or None
    divisor,  # see `Rows.divisor`
    counted,  # () int64: number of rows with a target; or None
    number: "fp32",  # the normalizer if it is a number
    count: "i64",
    ignore_index: "i64",
    limit: "i64",
    MEAN: tl.constexpr,
    NUMBER: tl.constexpr,
    NARROW: tl.constexpr,  # gradients of the forward pass are float16
    WEIGHTED: tl.constexpr,  # rows count with the class weights of their targets
    BLOCK: tl.constexpr,
):
    """Compute the divisor and the count. One program sums all rows in a fixed order."""
    sums = tl.zeros([BLOCK], tl.float32)
    sizes = tl.zeros([BLOCK], tl.float32)
    rows_counted = tl.zeros([BLOCK], tl.int64)
    NEEDED: tl.constexpr = ((MEAN and (normalizer is None and not NUMBER)) or NARROW) or counted is not None
    if NEEDED:
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
    one = tl.full((), 1.0, tl.float32)
    d = tl.sum(sums, 0)
    if NUMBER:
        d = one * number
    elif normalizer is not None:
        d = tl.load(normalizer).to(tl.float32)
    if not MEAN:
        d = one
    of_rows = d
    rest = one
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


@triton.jit
def _is_computed(row, count, rows, ignore_index, limit, ALL_ROWS: tl.constexpr):
    _y, a, ignored, wrong = row_facts(row, row < count, rows, ignore_index, limit)
    return tl.where(ignored if ALL_ROWS else (a == 0) & ~wrong, 0, 1)


@kernel
def partition_kernel(
    rows,  # without a divisor
    order,  # (N,) int64
    number,  # () int64
    count: "i64",
    ignore_index: "i64",
    limit: "i64",
    ALL_ROWS: tl.constexpr,  # rows of weight 0 are computed for their statistics
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stably partition the rows to compute to the front. Each program counts all rows to find the offset of its own."""
    for block in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        before = tl.zeros([COUNTED], tl.int32)
        everywhere = tl.zeros([COUNTED], tl.int32)
        for first in range(0, count, COUNTED):
            others = first + tl.arange(0, COUNTED)
            computed = _is_computed(others, count, rows, ignore_index, limit, ALL_ROWS)
            before += tl.where(others < block, computed, 0)
            everywhere += computed
        total = tl.sum(everywhere, 0)
        row = block + tl.arange(0, BLOCK)
        computed = _is_computed(row, count, rows, ignore_index, limit, ALL_ROWS)
        computed_before = tl.sum(before, 0) + tl.cumsum(computed, 0) - computed
        place = tl.where(computed != 0, computed_before, total + row - computed_before)
        tl.store(order + place, row.to(tl.int64), mask=row < count)
        if block == 0:
            tl.store(number, total.to(tl.int64))
