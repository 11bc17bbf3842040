"""Merge the sums of a Hopper product over its chunks of the vocabulary, into the packed sums of rows."""

import triton.language as tl

from xent.backends.triton.kernels.algebra import row_at, target_weight
from xent.backends.triton.kernels.maths import LN2, LOG2E, exp, finite
from xent.backends.triton.kernels.sums import load_sums, owner, put, target_number
from xent.backends.triton.prepared import kernel

__all__ = ["join_kernel"]


@kernel
def join_kernel(
    parts,  # (2 or 3, chunks, R) float32: the largest x, the sum of e, and with an entropy the sum of e log2 e
    chunks: "i32",
    count: "i64",  # R
    sums,  # (K, R) float32, rows `slot` apart
    slot: "i64",
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
    here = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = here < count
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    rest = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, chunks, PARTS):
        part = begin + tl.arange(0, PARTS)
        place = parts + part[:, None] * count + here[None, :]
        mask = (part < chunks)[:, None] & inside[None, :]
        part_peak = tl.load(place, mask=mask, other=-float("inf"))
        part_rest = tl.load(place + chunks * count, mask=mask, other=0.0)
        largest = tl.maximum(peak, tl.max(part_peak, 0))
        reference = finite(largest)
        kept = exp(peak - reference)
        share = exp(part_peak - reference[None, :])
        if columns.mixed >= 0:
            part_mixed = tl.load(place + 2 * chunks * count, mask=mask, other=0.0)
            growth = tl.where(part_peak == -float("inf"), 0.0, (reference[None, :] - part_peak) * LOG2E)
            mixed = kept * (mixed - tl.where(peak == -float("inf"), 0.0, (reference - peak) * LOG2E) * rest)
            mixed += tl.sum(share * (part_mixed - growth * part_rest), 0)
        rest = kept * rest + tl.sum(share * part_rest, 0)
        peak = largest
    row = row_at(start + here, inside, rows)
    owned, y, _a, _ignored = owner(row, inside, rows, ignore_index, first, width, vocabulary)
    place = sums + here
    if columns.squares >= 0 or columns.deficit >= 0:
        _rest, _below, _mixed, squares, deficit, _weights, _counted = load_sums(
            place, slot, inside, finite(peak), columns
        )
        put(place, slot, inside, squares, columns.squares)
        put(place, slot, inside, deficit, columns.deficit)
    put(place, slot, inside, peak, 0)
    put(place, slot, inside, rest, 1)
    put(place, slot, inside, tl.where(owned, tl.load(target_logits + here, mask=inside, other=0.0), 0.0), 2)
    put(place, slot, inside, mixed * LN2, columns.mixed)
    if columns.row_weight >= 0:
        w_y = tl.where(owned, target_weight(rows, tl.where(owned, y, 0)), 0.0)
        put(place, slot, inside, w_y, columns.row_weight)
    if columns.id >= 0:
        put(place, slot, inside, target_number(row, inside, rows), columns.id)
