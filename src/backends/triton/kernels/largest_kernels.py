"""The kernels of the k most probable classes: the largest logit of each block of classes, and a selection."""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import exp, tanh
from xent.backends.triton.launches import kernel

__all__ = ["maxima_kernel", "select_largest_kernel", "sortable"]


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


@triton.jit
def sortable(x, BITS: tl.constexpr):
    """Return int32 in the order of float32 numbers: NaN is the largest, and -0 equals 0. Numbers had BITS bits."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, key, 0x7FFFFFFF) >> (32 - BITS)


@kernel
def select_largest_kernel(
    logits,  # (R, M)
    row_stride: "i64",
    count: "i32",  # M
    k: "i32",
    blocks,  # (R, k) int64: the blocks of WIDTH logits to look at; None for all
    places,  # (R, k) int64: written in ascending order
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
):
    """Select the k largest logits of a row, the first among equals."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    inside = place < count
    if blocks is not None:
        inside = place < k * WIDTH
        place = tl.load(blocks + row * k + place // WIDTH, mask=inside, other=0) * WIDTH + place % WIDTH
        inside = inside & (place < count)
    x = tl.load(logits + row * row_stride + place, mask=inside, other=0.0).to(tl.float32)
    LEAST: tl.constexpr = -(2 ** (BITS - 1))
    key = tl.where(inside, sortable(x, BITS), LEAST)
    # The largest threshold that k logits reach, bit by bit.
    threshold = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= k, 0, LEAST)
    for step in range(BITS - 1):
        higher = threshold + (1 << (BITS - 2 - step))
        threshold = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= k, higher, threshold)
    above = key > threshold
    equal = inside & (key == threshold)
    missing = k - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
    tl.store(places + row * k + tl.cumsum(chosen.to(tl.int32), 0) - 1, place, mask=chosen)
