"""Gather the hidden states of a part's rows, and compute the logits of targets on this rank."""

import triton.language as tl

from xent.backends.triton.launch import kernel

__all__ = ["shard_take_kernel"]


@kernel
def shard_take_kernel(
    hidden,  # (N, D), in the order of the call
    hidden_row: "i64",
    hidden_column: "i64",
    weight,  # (C, D) and its strides
    weight_row: "i64",
    weight_column: "i64",
    bias,  # (C,) or None
    bias_stride: "i64",
    taken,  # (R, D), contiguous
    target_logits,  # (R,) float32, 0 if another rank has the target; or None
    rows,  # (R,) int64: indices of the rows in the call; None for start, start + 1, ...
    start: "i64",
    local,  # (N,) int64, in computation order: the targets relative to this rank's first class
    dead,  # (N,) bool, in the order of `local`; or None
    classes_here: "i64",  # C
    size: "i32",  # D
    BLOCK: tl.constexpr,
):
    """Copy one row of hidden states, or zeros if the row is dead. Compute its target's logit in float32."""
    here = tl.program_id(0).to(tl.int64)
    row = start + here
    of_call = row
    if rows is not None:
        of_call = tl.load(rows + here)
    skipped = here < 0
    if dead is not None:
        skipped = tl.load(dead + row) != 0
    y = tl.load(local + row)
    owned = (y >= 0) & (y < classes_here)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        columns = (first + tl.arange(0, BLOCK)).to(tl.int64)
        inside = columns < size
        h = tl.load(hidden + of_call * hidden_row + columns * hidden_column, mask=inside, other=0.0)
        h = h.to(taken.dtype.element_ty)
        if target_logits is not None:
            w = tl.load(weight + y * weight_row + columns * weight_column, mask=inside & owned, other=0.0)
            sums += h.to(tl.float32) * w.to(tl.float32)
        zero = tl.zeros([BLOCK], taken.dtype.element_ty)
        tl.store(taken + here * size + columns, tl.where(skipped, zero, h), mask=inside)
    if target_logits is not None:
        z = tl.sum(sums, 0)
        if bias is not None:
            z += tl.load(bias + y * bias_stride, mask=owned, other=0.0).to(tl.float32)
        tl.store(target_logits + here, tl.where(owned, z, 0.0))
