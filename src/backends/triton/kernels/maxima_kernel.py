"""The kernel of the k most probable classes: the largest logit of each block of classes, and the sums of the rows."""

import triton.language as tl

from xent.backends.triton.kernels.algebra import exp, tanh
from xent.backends.triton.launches import kernel

__all__ = ["maxima_kernel"]


@kernel
def maxima_kernel(
    logits,
    row_stride: "i64",
    classes: "i32",
    parts: "i32",  # of a row
    maxima,  # (R, blocks)
    sums,  # (R, parts, 2) float32: the largest x of a part, 0 if it is -inf, and sum_c exp(x_c - largest)
    scale: "fp32",
    softcap: "fp32",
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a part
    CAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Fold one part of one row, in one read. Logits are ordered: the scale is not negative."""
    program = tl.program_id(0).to(tl.int64)
    row = program // parts
    begin = logits + row * row_stride
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
        classes = classes // 8 * 8  # no change, but tells the compiler that it is a multiple of 8
    block = (program % parts).to(tl.int32) * BLOCKS + tl.arange(0, BLOCKS)
    places = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    z = tl.load(begin + places, mask=places < classes, other=float("-inf")).to(tl.float32)
    blocks = tl.cdiv(classes, BLOCK)
    tl.store(maxima + row * blocks + block, tl.max(z, 1), mask=block < blocks)
    x = z * scale
    if CAPPED:
        x = softcap * tanh(x / softcap)
    x = tl.where(places < classes, x, float("-inf"))
    largest = tl.max(tl.max(x, 1), 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(sums + program * 2, largest)
    tl.store(sums + program * 2 + 1, tl.sum(tl.sum(exp(x - largest), 1), 0))
