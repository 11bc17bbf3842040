"""Quantization to 8 bits in two layouts, and the exact part of logits and gradients: see `xent.backends.torch.fp8`.

Matrices (R, C) have adjacent columns. Codes are (R', C') and transposed ones (C', R'), with R' and C' the next
multiples of 16. ALIGNED: rows begin at multiples of 16 bytes, and C is a multiple of 16.
"""

import triton
import triton.language as tl

from xent.backends.triton.launches import kernel

LARGEST_CODE, LEAST_SCALE = tl.constexpr(448.0), tl.constexpr(2.0**-100)

__all__ = ["classes_kernel", "codes_kernel", "exact_kernel", "hidden_kernel", "magnitudes_kernel", "runs_kernel"]


@triton.jit
def _tile(matrix, stride, rows, columns, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows and columns of a program's tile, and its elements in float32, 0 outside of the matrix."""
    tall = tl.cdiv(rows, ROWS)
    r = tl.program_id(0) % tall * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) // tall * COLUMNS + tl.arange(0, COLUMNS)
    places = matrix + r[:, None] * stride + c[None, :]
    if ALIGNED:
        columns = columns // 16 * 16  # no change, but tells the compiler that it is a multiple
        places = tl.multiple_of(places, (1, 16))
    x = tl.load(places, mask=(r < rows)[:, None] & (c < columns)[None, :], other=0.0)
    return r, c, x.to(tl.float32)


@triton.jit
def _times(x, of_rows, of_columns, r, c, rows, columns):
    """Return x times factors of columns and rows, each of which may be None."""
    if of_columns is not None:
        x *= tl.load(of_columns + c, mask=c < columns, other=0.0)[None, :]
    if of_rows is not None:
        x *= tl.load(of_rows + r, mask=r < rows, other=0.0)[:, None]
    return x


@triton.jit
def _put_largest(place, index, size, x, AXIS: tl.constexpr):
    """Write the largest absolute values along an axis. As integers, NaN is the largest, and any order will do."""
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), AXIS)
    tl.atomic_max(place.to(tl.pointer_type(tl.int32)) + index, bits, mask=index < size, sem="relaxed")


@triton.jit
def _scale_of(largest, index, size, scale, writes):
    """Return the scales of rows or columns, see `xent.backends.torch.fp8`, and write them."""
    value = tl.load(largest + index, mask=index < size, other=0.0)
    own = tl.maximum(tl.div_rn(value, LARGEST_CODE), LEAST_SCALE, propagate_nan=tl.PropagateNan.ALL)
    own = tl.where(value == 0, 1.0, tl.where(value == float("inf"), float("nan"), own))
    tl.store(scale + index, own, mask=tl.where(writes, index < size, False))
    return own


@kernel
def magnitudes_kernel(
    matrix,  # (R, C)
    stride: "i64",
    rows: "i32",
    columns: "i32",
    row_factors,  # (R',) float32, for the columns' largest; or None
    column_factors,  # (C',) float32, for the rows' largest; or None
    of_rows,  # (R',) float32 zeros, or None
    of_columns,  # (C',) float32 zeros, or None
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find the largest absolute value of each row times the columns' factors, and of each column times the rows'."""
    r, c, x = _tile(matrix, stride, rows, columns, ALIGNED, ROWS, COLUMNS)
    if of_rows is not None:
        _put_largest(of_rows, r, rows, _times(x, None, column_factors, r, c, rows, columns), 1)
    if of_columns is not None:
        _put_largest(of_columns, c, columns, _times(x, row_factors, None, r, c, rows, columns), 0)


@kernel
def codes_kernel(
    matrix,  # (R, C)
    stride: "i64",
    rows: "i32",
    columns: "i32",
    codes,  # (R', C') in 8 bits, or None
    of_rows,  # (R',) float32: the rows' largest absolute values, times the factors
    row_scale,  # (R',) float32: the scales of the codes
    column_factors,  # (C',) float32, of the codes; or None
    transposed,  # (C', R') in 8 bits, or None
    of_columns,  # (C',) float32: the columns' largest absolute values; None for the same codes as those of the rows
    column_scale,  # (C',) float32: the scales of the transposed codes; or None
    row_factors,  # (R',) float32, of the transposed codes; or None
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantize a tile in both layouts. The first tiles also write the scales."""
    r, c, x = _tile(matrix, stride, rows, columns, ALIGNED, ROWS, COLUMNS)
    height, width = (rows + 15) // 16 * 16, (columns + 15) // 16 * 16
    inside = (r < height)[:, None] & (c < width)[None, :]
    tall = tl.cdiv(rows, ROWS)
    if codes is not None:
        scale = _scale_of(of_rows, r, height, row_scale, tl.program_id(0) // tall == 0)
        scaled = _times(x, None, column_factors, r, c, rows, columns) * tl.div_rn(1.0, scale)[:, None]
        own = scaled.to(codes.dtype.element_ty)
        places = codes + r.to(tl.int64)[:, None] * width + c[None, :]
        tl.store(tl.multiple_of(places, (1, 16)), own, mask=inside)
    if transposed is not None:
        if of_columns is not None:
            scale = _scale_of(of_columns, c, width, column_scale, tl.program_id(0) % tall == 0)
            scaled = _times(x, row_factors, None, r, c, rows, columns) * tl.div_rn(1.0, scale)[None, :]
            own = scaled.to(transposed.dtype.element_ty)
        places = transposed + c.to(tl.int64)[:, None] * height + r[None, :]
        tl.store(tl.multiple_of(places, (1, 16)), tl.trans(own), mask=tl.trans(inside))


@kernel
def exact_kernel(
    logits,  # (R, C), rows `logits_row` apart
    logits_row: "i64",
    hidden,  # (R, D)
    hidden_row: "i64",
    weight,  # (C, D) and its strides
    weight_row: "i64",
    weight_column: "i64",
    bias,  # (C,), or None
    ids,  # (R, E) int64: classes
    entries: "i32",  # E
    size: "i32",  # D
    ENTRIES: tl.constexpr,  # at least E
    BLOCK: tl.constexpr,
):
    """Write the logits of E classes of a row, products of the factors that are not quantized."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, ENTRIES)
    y = tl.load(ids + row * entries + e, mask=e < entries, other=0)
    sums = tl.zeros([ENTRIES], tl.float32)
    for first in range(0, size, BLOCK):
        d = first + tl.arange(0, BLOCK)
        h = tl.load(hidden + row * hidden_row + d, mask=d < size, other=0.0).to(tl.float32)
        places = weight + y[:, None] * weight_row + d[None, :] * weight_column
        w = tl.load(places, mask=(e < entries)[:, None] & (d < size)[None, :], other=0.0)
        sums += tl.sum(h[None, :] * w.to(tl.float32), 1)
    if bias is not None:
        sums += tl.load(bias + y).to(tl.float32)
    tl.store(logits + row * logits_row + y, sums.to(logits.dtype.element_ty), mask=e < entries)


@kernel
def hidden_kernel(
    product,  # (R, D), rows `product_row` apart
    product_row: "i64",
    weight,  # (C, D) and its strides
    weight_row: "i64",
    weight_column: "i64",
    ids,  # (R, E) int64: classes
    grads,  # (R, E) float32: the gradients of their logits
    order,  # (R,) int64: the rows of the call; or None for those from `start` on
    start: "i64",
    out,  # (N, D), contiguous
    classes: "i64",  # C
    entries: "i32",  # E
    size: "i32",  # D
    BLOCK: tl.constexpr,
):
    """Write the gradient of one hidden state: its row of the product plus g W of its exact entries."""
    local_row = tl.program_id(0).to(tl.int64)
    row = start + local_row
    if order is not None:
        row = tl.load(order + local_row)
    for first in range(0, size, BLOCK):
        d = first + tl.arange(0, BLOCK)
        sums = tl.load(product + local_row * product_row + d, mask=d < size, other=0.0).to(tl.float32)
        for e in range(entries):
            y, g = tl.load(ids + local_row * entries + e), tl.load(grads + local_row * entries + e)
            own_size = tl.where((y >= 0) & (y < classes) & (g != 0), size, 0)
            w = tl.load(weight + y * weight_row + d * weight_column, mask=d < own_size, other=0.0)
            sums += g * w.to(tl.float32)
        tl.store(out + row * size + d, sums.to(out.dtype.element_ty), mask=d < size)


@kernel
def classes_kernel(
    total,  # (C, D), contiguous
    hidden,  # (N, D)
    hidden_row: "i64",
    grads,  # (N, E) float32: the gradients of the exact entries
    ordered,  # (N E,) int64: their classes, ascending
    order,  # (N E,) int64: their places in `grads`
    begins,  # (N E,) int64: the first place of each one's class in `ordered`
    sums,  # (2 ceil(N E / MOST), D) float32: those of runs of classes with more than MOST entries
    long_runs,  # (ceil(N E / MOST),) int64, -1: where such a class begins
    count: "i64",  # N E
    entries: "i32",  # E
    classes: "i64",  # C
    size: "i32",  # D
    ALIGNED: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum g h of at most MOST entries of one class, a run, in a part of its columns.

    There is one program for each entry and part; that of a run's first entry computes it. If the class has no other
    run, the sum is added to its row of `total`; `runs_kernel` adds those of several runs.
    """
    parts = tl.cdiv(size, BLOCK)
    at = (tl.program_id(0) // parts).to(tl.int64)
    d = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    y, begin = tl.load(ordered + at), tl.load(begins + at)
    if ((at - begin) % MOST == 0) & (y >= 0) & (y < classes):
        total_row = tl.zeros([BLOCK], tl.float32)
        if ALIGNED:
            size = size // 16 * 16
        for first in range(0, MOST, ROWS):
            index = at + first + tl.arange(0, ROWS)
            alike = tl.load(ordered + index, mask=index < count, other=-1) == y
            entry = tl.load(order + index, mask=alike, other=0)
            g = tl.load(grads + entry, mask=alike, other=0.0)
            places = hidden + (entry // entries)[:, None] * hidden_row + d[None, :]
            if ALIGNED:
                places = tl.multiple_of(places, (1, 16))
            h = tl.load(places, mask=(g != 0)[:, None] & (d < size)[None, :], other=0.0)
            total_row += tl.sum(g[:, None] * h.to(tl.float32), 0)
        if tl.load(ordered + begin + MOST, mask=begin + MOST < count, other=-1) == y:
            tl.store(sums + (2 * (at // MOST) + (at == begin).to(tl.int64)) * size + d, total_row, mask=d < size)
            tl.store(long_runs + at // MOST, at, mask=at == begin)
        else:
            _add(total + y * size + d, total_row, d < size)


@kernel
def runs_kernel(
    total,  # (C, D), contiguous
    ordered,  # see `classes_kernel`, like sums and `long_runs`
    sums,
    long_runs,
    count: "i64",
    size: "i32",
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sums of all runs of one class to a part of its row of `total`."""
    parts = tl.cdiv(size, BLOCK)
    place = (tl.program_id(0) // parts).to(tl.int64)
    d = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(long_runs + place)
    if at >= 0:
        y = tl.load(ordered + at)
        total_row = tl.load(sums + (2 * place + 1) * size + d, mask=d < size, other=0.0)
        at += MOST
        while tl.load(ordered + at, mask=at < count, other=-1) == y:
            total_row += tl.load(sums + 2 * (at // MOST) * size + d, mask=d < size, other=0.0)
            at += MOST
        _add(total + y * size + d, total_row, d < size)


@triton.jit
def _add(place, value, inside):
    """Add float32 numbers to those at `place`, and round once."""
    value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, value.to(place.dtype.element_ty), mask=inside)
