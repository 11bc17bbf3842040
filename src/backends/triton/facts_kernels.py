"""Kernels that run before the logits exist: the divisor of a mean, and the order in which rows are computed."""

import triton
import triton.language as tl

from xent.backends.triton.launch import kernel
from xent.backends.triton.row_algebra import inverse_of, row_facts

__all__ = ["divisor_kernel", "partition_kernel"]


@kernel
def divisor_kernel(
    target,  # (N,) integers, or None for probabilities
    sample_weight,
    class_weight,
    normalizer,  # () or None
    scratch,  # float32: D, 1 / D or 0, remaining factor of narrow gradients
    counted,  # () int64: number of rows with a target; or None
    number: "fp32",  # the normalizer if it is a number
    count: "i64",
    length: "i64",
    shift: "i64",
    ignore_index: "i64",
    vocabulary: "i32",
    SHIFTED: tl.constexpr,
    MEAN: tl.constexpr,
    NUMBER: tl.constexpr,
    NARROW: tl.constexpr,  # intermediate gradients are float16
    PROBABILITIES: tl.constexpr,
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
            _y, a, w_y, ignored, wrong = row_facts(
                row, row < count, target, sample_weight, class_weight, length, shift, ignore_index, vocabulary,
                SHIFTED, PROBABILITIES,
            )  # fmt: skip
            weighted = a * w_y
            sums += tl.where(wrong, 0.0, weighted)
            size = tl.abs(weighted)
            sizes = tl.maximum(sizes, tl.where(wrong | (size != size), 0.0, tl.minimum(size, 3.4e38)))
            rows_counted += tl.where(ignored, 0, 1)
    d = tl.sum(sums, 0)
    if NUMBER:
        d = number
    elif normalizer is not None:
        d = tl.load(normalizer).to(tl.float32)
    one = tl.full((), 1.0, tl.float32)
    inverse = one
    if MEAN:
        inverse = inverse_of(d)
    else:
        d = one
    rest = one
    if NARROW:
        # In float16, gradients multiplied by 1/D could underflow before a loss scale is applied, and weights could make
        # them overflow. So gradients are stored with row factors of at most 1, and `rest` is the remaining factor.
        largest = tl.max(sizes, 0)
        largest = tl.where(largest == 0, 1.0, largest)
        rest = inverse * largest
        inverse = tl.where(inverse == 0, 0.0, tl.div_rn(one, largest))
    tl.store(scratch, d)
    tl.store(scratch + 1, inverse)
    tl.store(scratch + 2, rest)
    if counted is not None:
        tl.store(counted, tl.sum(rows_counted, 0))


@triton.jit
def _is_computed(
    row, count, target, sample_weight, class_weight, length, shift, ignore_index, vocabulary,
    SHIFTED: tl.constexpr, ALL_ROWS: tl.constexpr,
):  # fmt: skip
    _y, a, _w, ignored, wrong = row_facts(
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
    return tl.where(ignored if ALL_ROWS else (a == 0) & ~wrong, 0, 1)


@kernel
def partition_kernel(
    target,
    sample_weight,
    class_weight,
    order,  # (N,) int64
    number,  # () int64
    count: "i64",
    length: "i64",
    shift: "i64",
    ignore_index: "i64",
    vocabulary: "i32",
    SHIFTED: tl.constexpr,
    ALL_ROWS: tl.constexpr,  # rows of weight 0 are computed for their statistics
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stably partition the rows to compute to the front. Each program counts all rows to find the offset of its own."""
    for block in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        before = tl.zeros([COUNTED], tl.int32)
        everywhere = tl.zeros([COUNTED], tl.int32)
        for first in range(0, count, COUNTED):
            rows = first + tl.arange(0, COUNTED)
            computed = _is_computed(
                rows,
                count,
                target,
                sample_weight,
                class_weight,
                length,
                shift,
                ignore_index,
                vocabulary,
                SHIFTED,
                ALL_ROWS,
            )
            before += tl.where(rows < block, computed, 0)
            everywhere += computed
        total = tl.sum(everywhere, 0)
        row = block + tl.arange(0, BLOCK)
        computed = _is_computed(
            row, count, target, sample_weight, class_weight, length, shift, ignore_index, vocabulary, SHIFTED, ALL_ROWS
        )
        computed_before = tl.sum(before, 0) + tl.cumsum(computed, 0) - computed
        place = tl.where(computed != 0, computed_before, total + row - computed_before)
        tl.store(order + place, row.to(tl.int64), mask=row < count)
        if block == 0:
            tl.store(number, total.to(tl.int64))
