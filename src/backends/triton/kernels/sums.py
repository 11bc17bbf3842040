"""The packed sums of rows over some classes, see `xent.backends.torch.contract`: how they merge, and their kernels.

All merges (tiles of a row, chunks of a product, ranks of a process group) convert sums to a common reference first.
Where `peak` is -inf, the sums are relative to 0. A column that a call does not have has the number -1. `sums` are rest,
below, weights, mixed, squares, deficit and counted.

`finish_kernel` serves tiles, products that store no logits, shards, and the backward pass from saved sums. Every rank
computes the same bits.

The other kernels: the divisor of a mean, hidden states, the scale of gradients.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import (
    LN2,
    LOG2E,
    NOWHERE,
    activate,
    activation_of,
    divisors_of,
    exp,
    finish,
    finite,
    given_rows,
    gradient_factor,
    has_statistics,
    is_given,
    load,
    numbers_of,
    optional,
    position,
    record_nothing,
    row_at,
    row_facts,
    times,
)
from xent.backends.triton.launches import kernel

__all__ = [
    "EXCLUDED",
    "check_of",
    "column",
    "divisor_kernel",
    "finish_kernel",
    "join_kernel",
    "larger",
    "load_sums",
    "owner",
    "partition_kernel",
    "plus",
    "put",
    "rebased",
    "scale_block",
    "scale_kernel",
    "select_kernel",
]


EXCLUDED = tl.constexpr(-2)  # the class of a row whose gradient is 0
MULTIPLIER = tl.constexpr(-1640531535)  # odd, 2^32 divided by the golden ratio, as int32


@triton.jit
def column(place, sums_stride, inside, COLUMN: tl.constexpr):
    """Load a column of sums, rows of `sums_stride` elements; 0 if there is no such column."""
    if COLUMN < 0:
        return 0.0
    else:
        return load(place + COLUMN * sums_stride, inside, 0.0)


@triton.jit
def put(place, sums_stride, inside, sums, columns: tl.constexpr):
    """Store the values of columns, in the order of `Columns`."""
    for k in tl.static_range(14):
        if columns[k] >= 0:
            tl.store(place + columns[k] * sums_stride, sums[k], mask=inside)


@triton.jit
def rebased(reference, peak, sums):
    """Return sums relative to a larger, finite reference."""
    rest, below, weights, mixed, squares, deficit, counted = sums
    factor = exp(peak - reference)
    growth = reference - finite(peak)
    return (
        rest * factor,
        below + times(weights, growth),
        weights,
        factor * (mixed - growth * rest),
        factor * factor * squares,
        deficit + times(counted, growth),
        counted,
    )


@triton.jit
def load_sums(place, sums_stride, inside, reference, columns: tl.constexpr):
    """Return sums relative to a larger, finite reference. Those that a call does not have, and masked ones, are 0."""
    sums = ()
    for k in tl.static_range(7):
        sums += (column(place, sums_stride, inside, columns[k]),)  # type: ignore[assignment]
    return rebased(reference, load(place + columns.peak * sums_stride, inside, -float("inf")), sums)


@triton.jit
def plus(a, b):
    """Return the sum of sums that have the same reference."""
    sums = ()
    for k in tl.static_range(7):
        sums += (a[k] + b[k],)  # type: ignore[assignment]
    return sums


@triton.jit
def larger(key, place, other_key, other_place):
    """Return the larger of two keys and its class; the lowest class if they are equal."""
    lower = tl.minimum(place, other_place)
    winner = tl.where(key > other_key, place, tl.where(other_key > key, other_place, lower))
    return tl.maximum(key, other_key), winner


@triton.jit
def owner(row, inside, rows, ignore_index, first, width, vocabulary):
    """Return whether the target of a row is among the classes [first, first + width), and its place among them.

    The place is `width` if it is not. Return also its class weight, 0 if it is not, the row's sample weight, and
    whether it is ignored.
    """
    y, a, ignored, invalid = row_facts(row, inside, rows, ignore_index, vocabulary)
    owned = (y >= first) & (y < first + width) & ~(ignored | invalid)
    y = tl.where(owned, y - first, width).to(tl.int32)
    w_y = tl.where(owned, optional(rows.class_weight, y, owned, 1.0), 0.0)  # a rank may have no class
    return owned, y, w_y, a, ignored


@triton.jit
def check_of(row, local_row, ignored, rows, input_checks):
    """Return the checksum (int32) of a row, which must be equal on all ranks; see `shards.checks.row_checks`."""
    check = row.to(tl.int32) * MULTIPLIER + tl.load(rows.target + row).to(tl.int32)
    if is_given(rows.sample_weight):
        check = check * MULTIPLIER + optional(rows.sample_weight, row, None, 0.0).to(tl.int32, bitcast=True)
    if is_given(rows.temperature):
        temperature = optional(rows.temperature, row, None, 0.0).to(tl.int32, bitcast=True)
        check = check * MULTIPLIER + tl.where(ignored, 0, temperature)
    if input_checks is not None:
        check = check * MULTIPLIER + tl.where(ignored, 0, tl.load(input_checks + local_row))
    return check


@triton.jit
def _checked(block, places):
    """Return the bits of the elements of a row times odd factors of their places, int32. Their sum is its checksum."""
    factors = (places + 1).to(tl.int32) * MULTIPLIER
    factors = ((factors ^ (factors >> 15)) * MULTIPLIER) | 1
    if block.dtype.primitive_bitwidth == 16:
        bits = block.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = block.to(tl.int32, bitcast=True)
    return bits * factors


@kernel
def finish_kernel(
    sums,  # (ranks, K, R) float32
    rank_stride: "i64",
    ranks: "i32",
    count: "i64",  # R
    rows,
    upstreams,
    results,
    numbers,
    start: "i64",  # index of the first row in `rows.order`, or in the call
    saved,  # (K, N) float32, in the order of the call, or null
    saved_row: "i64",
    out,  # (6, R) float32 or null: m, factor, the target's gradient, log_factor, delta, bits of the target's class
    ignore_index: "i64",
    first: "i32",  # the first class of this rank
    width: "i32",
    vocabulary: "i32",
    range_check: "i32",  # of all classes
    columns: tl.constexpr,  # see `Columns`
    way: tl.constexpr,  # see `Way`
    BLOCK: tl.constexpr,
):
    """Merge the sums of `BLOCK` rows over all ranks, in rank order. Write results, and coefficients of gradients."""
    local_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = local_row < count
    row = row_at(start + local_row, inside, rows)
    y, a, ignored, invalid = row_facts(row, inside, rows, ignore_index, vocabulary)
    checks = 0.0, 0.0
    if columns.check >= 0:
        # A row that differs between ranks is invalid on all of them, and so are all rows if classes do not tile [0, V).
        own = column(sums + local_row, count, inside, columns.check).to(tl.int32, bitcast=True)
        all_classes = tl.zeros([BLOCK], tl.int32)
        differs = own != own
        for rank in range(ranks):
            place = sums + rank * rank_stride + local_row
            differs = differs | (column(place, count, inside, columns.check).to(tl.int32, bitcast=True) != own)
            all_classes += column(place, count, inside, columns.range).to(tl.int32, bitcast=True)
        differs = differs | (all_classes != range_check)
        marked = tl.where(differs, range_check + 1, range_check)  # for the backward pass
        checks = 0.0, marked.to(tl.float32, bitcast=True)
        ignored = ignored & ~differs
        invalid = invalid | differs
        a = tl.where(differs, 1.0, a)

    nothing = tl.zeros([BLOCK], tl.float32)
    peak = nothing - float("inf")
    z_y = nothing
    w_y = nothing
    for rank in range(ranks):
        place = sums + rank * rank_stride + local_row
        peak = tl.maximum(peak, column(place, count, inside, columns.peak))
        z_y += column(place, count, inside, columns.target)
        w_y += column(place, count, inside, columns.row_weight)
    if columns.row_weight < 0:
        w_y += 1
    activation = activation_of(row, inside, rows, numbers)
    x_y = activate(z_y, activation, way)
    m = finite(tl.maximum(peak, x_y))
    merged = nothing, nothing, nothing, nothing, nothing, nothing, nothing
    key = nothing - float("inf")
    top_class = tl.full([BLOCK], NOWHERE, tl.int32)
    for rank in range(ranks):
        place = sums + rank * rank_stride + local_row
        merged = plus(merged, load_sums(place, count, inside, m, columns))
        if columns.key >= 0:
            own_top = column(place, count, inside, columns.place).to(tl.int32, bitcast=True)
            key, top_class = larger(key, top_class, column(place, count, inside, columns.key), own_top)
    packed = merged + (m, z_y, w_y, key, top_class.to(tl.float32, bitcast=True)) + checks
    put(saved + row, saved_row, given_rows(saved, inside), packed, columns)

    rest, below, weights, mixed, squares, deficit, _counted = merged
    divisor, of_gradient = divisors_of(rows)
    excluded, r = gradient_factor(row, inside, a, invalid, of_gradient, upstreams)
    distance = x_y - m
    total = rest, below - times(w_y, distance), weights + w_y, mixed * LOG2E, squares
    factor, log_factor, delta, g_y, _gamma = finish(
        divisor, row, inside, (y, a, ignored, invalid), excluded, r, w_y, z_y, m, total, distance * LOG2E,
        m - deficit / vocabulary.to(tl.float32), top_class, None, results, upstreams,
        numbers_of(rows, vocabulary, numbers), activation, way,
    )  # fmt: skip
    own_class = tl.where((y >= first) & (y < first + width), y - first, -1).to(tl.int32)
    own_class = tl.where(tl.where(has_statistics(upstreams), ignored, excluded), EXCLUDED, own_class)
    coefficients = m, factor, g_y, nothing + log_factor, delta, own_class.to(tl.float32, bitcast=True)
    for k in tl.static_range(6):
        tl.store(out + k * count + local_row, coefficients[k], mask=given_rows(out, inside))


@kernel
def join_kernel(
    parts,  # (2 or 3, chunks, R) float32: the largest x, the sum of e, and with an entropy the sum of e log2 e
    chunks: "i32",
    count: "i64",  # R
    sums,  # (K, R) float32, rows `sums_stride` apart
    sums_stride: "i64",
    target_logits,  # (R,) float32
    rows,
    start: "i64",  # index of the first row in `rows.order`, or in the call
    ignore_index: "i64",
    first: "i32",  # the first class of this rank
    width: "i32",  # the number of its classes
    vocabulary: "i32",
    columns: tl.constexpr,  # see `Columns`; tiles have written squares and deficit, with another reference
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # chunks that are read at a time
):
    """Write the sums of a block of rows."""
    local_row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = local_row < count
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    rest = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, chunks, PARTS):
        part = begin + tl.arange(0, PARTS)
        place = parts + part[:, None] * count + local_row[None, :]
        mask = (part < chunks)[:, None] & inside[None, :]
        part_peak = tl.load(place, mask=mask, other=-float("inf"))
        part_rest = tl.load(place + chunks * count, mask=mask, other=0.0)
        largest = tl.maximum(peak, tl.max(part_peak, 0))
        reference = finite(largest)
        factor = exp(peak - reference)
        share = exp(part_peak - reference[None, :])
        if columns.mixed >= 0:
            part_mixed = tl.load(place + 2 * chunks * count, mask=mask, other=0.0)
            growth = (reference[None, :] - finite(part_peak)) * LOG2E
            mixed = factor * (mixed - (reference - finite(peak)) * LOG2E * rest)
            mixed += tl.sum(share * (part_mixed - growth * part_rest), 0)
        rest = factor * rest + tl.sum(share * part_rest, 0)
        peak = largest
    row = row_at(start + local_row, inside, rows)
    owned, _y, w_y, _a, _ignored = owner(row, inside, rows, ignore_index, first, width, vocabulary)
    place = sums + local_row
    _rest, below, weights, _mixed, squares, deficit, counted = load_sums(
        place, sums_stride, inside, finite(peak), columns
    )
    z_y = tl.where(owned, tl.load(target_logits + local_row, mask=inside, other=0.0), 0.0)
    key, top_class = column(place, sums_stride, inside, columns.key), column(place, sums_stride, inside, columns.place)
    packed = rest, below, weights, mixed * LN2, squares, deficit, counted
    check = tl.full((), 0.0, tl.float32)  # there is none; Triton 3.6 takes no Python number here
    put(place, sums_stride, inside, packed + (peak, z_y, w_y, key, top_class, check, check), columns)


@kernel
def divisor_kernel(
    rows,  # without a divisor; with class weights, (C,) or of each row's target, if rows count with them
    normalizer,  # (): the divisor; null for the sum of the row weights
    divisor,  # see `Rows.divisor`
    counted,  # () int64: number of rows with a target; or null
    count: "i64",
    ignore_index: "i64",
    limit: "i64",
    others: "fp32",  # see `xent.backends.torch.portable.facts.options_of_float16`, like scale
    scale: "fp32",
    numbers,  # (2,) float32: both, if one is a tensor; or null
    in_float16: "i32",  # whether gradients of the forward pass are float16
    of_rows: "i32",  # whether class weights are those of the rows
    BLOCK: tl.constexpr,
):
    """Compute the divisor and the count. One program sums all rows in a fixed order."""
    sums = tl.zeros([BLOCK], tl.float32)
    sizes = tl.zeros([BLOCK], tl.float32)
    rows_counted = tl.zeros([BLOCK], tl.int64)
    if is_given(numbers):
        others = tl.load(numbers)
        scale = tl.load(numbers + 1)
    for first in range(0, count, BLOCK):
        row = first + tl.arange(0, BLOCK)
        y, a, ignored, wrong = row_facts(row, row < count, rows, ignore_index, limit)
        weighted = a * optional(rows.class_weight, tl.where(of_rows != 0, row, y), row < count, 1.0)
        sums += tl.where(wrong, 0.0, weighted)
        size = tl.abs(weighted) + others * tl.abs(a)
        sizes = tl.maximum(sizes, tl.where(wrong | (size != size), 0.0, tl.minimum(size, 3.4e38)))
        rows_counted += tl.where(ignored, 0, 1)
    d = tl.sum(sums, 0)
    if is_given(normalizer):
        d = tl.load(normalizer).to(tl.float32)
    # In float16, gradients divided by D could underflow before a loss scale is applied, and weights or scales could
    # make them overflow. So they are divided by a bound of their row factors; `rest` is the remaining factor.
    largest = tl.max(sizes, 0) * scale
    largest = tl.where(largest == 0, 1.0, largest)
    rest = tl.where(d == 0, 0.0, tl.div_rn(largest, tl.where(d == 0, 1.0, d)))
    tl.store(divisor, d)
    tl.store(divisor + 1, tl.where(in_float16 != 0, tl.where(d == 0, 0.0, largest), d))
    tl.store(divisor + 2, tl.where(in_float16 != 0, rest, 1.0))
    tl.store(counted, tl.sum(rows_counted, 0), mask=is_given(counted))


@kernel
def partition_kernel(
    rows,
    results,
    order,  # (N,) int64
    counted,  # () int64: the number of rows to compute
    count: "i64",  # N
    ignore_index: "i64",
    limit: "i64",
    all_rows: "i32",  # rows of weight 0 are computed
    BLOCK: tl.constexpr,
):
    """Write the rows to compute, in order, then the others, and the results of the others. One program has all rows."""
    computed = tl.zeros([], tl.int32)
    for first in range(0, count, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < count
        _y, a, ignored, invalid = row_facts(row, inside, rows, ignore_index, limit)
        skipped = ignored | ((all_rows == 0) & (a == 0) & ~invalid)
        each = tl.where(skipped, 0, 1)
        before = computed + tl.cumsum(each, 0) - each
        tl.store(order + tl.where(skipped, count - 1 - (row - before), before), row, mask=inside)
        record_nothing(row, inside & skipped, results)
        computed += tl.sum(each, 0)
    tl.store(counted, computed.to(tl.int64))


@kernel
def select_kernel(
    hidden,  # (N, D)
    hidden_row: "i64",
    hidden_column: "i64",
    weight,  # (C, D) and its strides
    weight_row: "i64",
    weight_column: "i64",
    bias,  # (C,), contiguous, or null
    selected,  # (R, D), contiguous; or None
    target_logits,  # (R,) float32, 0 for the targets of other ranks; or None
    checks,  # (R,) int32: checksums of the hidden states; or None
    rows,
    start: "i64",
    ignore_index: "i64",
    limit: "i64",
    first_class: "i64",
    width: "i64",  # C
    size: "i32",  # D
    of_statistics: "i32",  # whether rows of weight 0 have gradients, from their statistics
    BLOCK: tl.constexpr,
):
    """Copy one row of hidden states, or zeros if the row has no gradient. Compute its target's logit in float32."""
    local_row = tl.program_id(0).to(tl.int64)
    row = row_at(start + local_row, None, rows)
    y, a, ignored, wrong = row_facts(row, None, rows, ignore_index, limit)
    y -= first_class
    a = tl.where(optional(rows.divisor, 1, None, 1.0) == 0, 0.0, a)
    excluded = tl.where(of_statistics != 0, ignored, (a == 0) & ~wrong)
    owned = (y >= 0) & (y < width)
    own_size = tl.where(owned, size, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    check = tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        columns = (first + tl.arange(0, BLOCK)).to(tl.int64)
        h = tl.load(hidden + row * hidden_row + columns * hidden_column, mask=columns < size, other=0.0)
        if checks is not None:
            check += _checked(h, columns)
        if target_logits is not None:
            # Round to the dtype of the matrix product.
            rounded = h.to(weight.dtype.element_ty).to(tl.float32)
            w = tl.load(weight + y * weight_row + columns * weight_column, mask=columns < own_size, other=0.0)
            sums += tl.where(columns < own_size, rounded * w.to(tl.float32), 0.0)
        if selected is not None:
            zero = tl.zeros([BLOCK], selected.dtype.element_ty)
            copied = tl.where(excluded, zero, h.to(selected.dtype.element_ty))
            tl.store(selected + local_row * size + columns, copied, mask=columns < size)
    if checks is not None:
        tl.store(checks + local_row, tl.sum(check.to(tl.int64), 0).to(tl.int32))  # Triton 3.8 interprets no overflow
    if target_logits is not None:
        z = tl.sum(sums, 0)
        z += optional(bias, y, owned, 0.0)
        tl.store(target_logits + local_row, z)


@kernel
def scale_kernel(
    grad,  # rows at position(row, inner, outer_stride, row_stride)
    inner: "i64",
    outer_stride: "i64",
    row_stride: "i64",
    second,  # (second_length,): another gradient, or None
    upstream,  # ()
    deferred,  # () or None
    rows: "i64",
    length: "i64",  # elements of a row
    second_length: "i64",
    BLOCK: tl.constexpr,
):
    """Multiply gradients by factors and round once; do nothing if the product of the factors is 1."""
    blocks = tl.cdiv(length, BLOCK)
    factor = tl.load(upstream).to(tl.float32)
    if deferred is not None:
        factor *= tl.load(deferred)
    if factor != 1:
        for block in range(tl.program_id(0).to(tl.int64), rows * blocks, tl.num_programs(0)):
            begin = position(block // blocks, inner, outer_stride, row_stride, True)
            places = block % blocks * BLOCK + tl.arange(0, BLOCK)
            scale_block(grad + begin, places, length, factor)
        if second is not None:
            for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(second_length, BLOCK), tl.num_programs(0)):
                scale_block(second, block * BLOCK + tl.arange(0, BLOCK), second_length, factor)


@triton.jit
def scale_block(begin, places, length, factor):
    """Multiply elements of a gradient by a factor."""
    inside = places < length
    scaled = tl.load(begin + places, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(begin + places, scaled.to(begin.dtype.element_ty), mask=inside)
