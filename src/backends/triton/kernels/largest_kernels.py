"""The kernel of the k most probable classes: each row is read once, and then little of it a second time.

The k blocks of classes with the largest maxima, the first among equals, have the k largest logits, the first among
equals: each of them has a logit that comes before those of any other block. So one read finds the maxima. A program
selects k of these, and then k of the logits in their blocks, by bisection in registers. While it does so, other
programs of the same multiprocessor read their rows.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import exp, finite, tanh
from xent.backends.triton.launches import kernel

__all__ = ["count_above_kernel", "largest_kernel", "maxima_kernel", "sortable"]


OTHERS = tl.constexpr(32)  # logits with which all K are compared at a time


@triton.jit
def sortable(x, BITS: tl.constexpr):
    """Return int32 in the order of float32 numbers: NaN is the largest, and -0 equals 0. Numbers had BITS bits."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, key, 0x7FFFFFFF) >> (32 - BITS)


@triton.jit
def _select(key, k, low):
    """Return which are the k largest keys, the first among equals, and their places among these, in the same order.

    At least k keys reach `low`.
    """
    high = tl.max(key, 0)
    while low < high:  # the k-th largest key is in [low, high]
        middle = (low | high) - ((low ^ high) >> 1)
        count = tl.sum((key >= middle).to(tl.int32), 0)
        low = tl.where(count < k, low, middle)
        high = tl.where(count < k, middle - 1, tl.where(count == k, middle, high))
    above, equal = key > low, key == low
    missing = k - tl.sum(above.to(tl.int32), 0)
    counts = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    equals = counts >> 16
    return above | (equal & (equals <= missing)), (counts & 0xFFFF) + tl.minimum(equals, missing) - 1, low


@kernel
def maxima_kernel(
    logits,  # (R, C)
    row_stride: "i64",
    classes: "i32",
    maxima,  # (R, blocks)
    log_sums,  # (R,) float32: log sum_c exp(x_c - the largest x); 0 if all x are -inf
    scale: "fp32",
    softcap: "fp32",
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # that are read at a time
    CAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write the maximum of each block of a row, and the sum of all its exponentials. The scale is not negative."""
    STEP: tl.constexpr = BLOCK * BLOCKS
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    if ALIGNED:
        logits = tl.multiple_of(logits, 16)
        classes = classes // 8 * 8  # no change, but tells the compiler that it is a multiple of 8
    blocks, block = tl.cdiv(classes, BLOCK), tl.arange(0, BLOCKS)
    maxima += row * blocks
    places = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    peak, total = tl.full([BLOCKS], -float("inf"), tl.float32), tl.zeros([BLOCKS], tl.float32)
    ahead = tl.load(logits + places, mask=places < classes, other=-float("inf"))
    for first in range(0, classes, STEP):  # the next logits are loaded before these are used
        z, following = ahead.to(tl.float32), first + STEP + places
        ahead = tl.load(logits + following, mask=following < classes, other=-float("inf"))
        largest = tl.max(z, 1)
        tl.store(maxima + first // BLOCK + block, largest, mask=block < blocks - first // BLOCK)
        x, largest = z * scale, largest * scale
        if CAPPED:
            x = tl.where(first + places < classes, softcap * tanh(x / softcap), -float("inf"))
            largest = softcap * tanh(largest / softcap)
        largest = tl.maximum(peak, largest)
        reference = finite(largest)
        total = total * exp(peak - reference) + tl.sum(exp(x - reference[:, None]), 1)
        peak = largest
    reference = finite(tl.max(peak, 0))
    total = tl.sum(total * exp(peak - reference), 0)
    tl.store(log_sums + row, tl.log(tl.where(total == 0, 1.0, total)))


@kernel
def largest_kernel(
    logits,  # (R, C)
    row_stride: "i64",
    classes: "i32",
    k: "i32",
    maxima,  # (R, blocks): see `maxima_kernel`
    ids,  # (R, k) int64
    top,  # (R, k) float32
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,  # at least the blocks of a row
    PLACES: tl.constexpr,  # at least k
    BITS: tl.constexpr,
):
    """Write the classes of the k largest logits, the largest first, the first among equals, and these logits."""
    LEAST: tl.constexpr = -(2 ** (BITS - 1))
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    ids += row * k
    top += row * k
    blocks = tl.cdiv(classes, BLOCK)
    count = tl.minimum(k, blocks)
    # The blocks with the largest maxima.
    block = tl.arange(0, SIZE)
    inside = block < blocks
    key = sortable(tl.load(maxima + row * blocks + block, mask=inside, other=0.0).to(tl.float32), BITS)
    key, least = tl.where(inside, key, LEAST), tl.min(tl.where(inside, key, -LEAST - 1), 0)
    chosen, place, least = _select(key, count, least)
    tl.store(ids + place, block.to(tl.int64), mask=chosen)
    tl.debug_barrier()
    # The largest of their logits. `top` has their places among these until their classes are known.
    lane = tl.arange(0, PLACES * BLOCK)
    inside = lane < count * BLOCK
    of_lane = tl.load(ids + lane // BLOCK, mask=inside, other=0).to(tl.int32) * BLOCK + lane % BLOCK
    inside = inside & (of_lane < classes)
    z = tl.load(logits + of_lane, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(inside, sortable(z, BITS), LEAST)
    chosen, place, least = _select(key, k, tl.where(count == k, least, LEAST))
    tl.store(top + place, lane.to(tl.float32), mask=chosen)
    tl.debug_barrier()
    lane = tl.arange(0, PLACES)
    inside = lane < k
    place = tl.load(top + lane, mask=inside, other=0.0).to(tl.int32)
    of_lane = tl.load(ids + place // BLOCK, mask=inside, other=0) * BLOCK + place % BLOCK
    z = tl.load(logits + of_lane, mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()
    tl.store(top + lane, z, mask=inside)
    tl.debug_barrier()
    # Their order: the number of logits that come before each.
    key, place = sortable(z, 32), tl.zeros([PLACES], tl.int32)
    for start in range(0, k, OTHERS):
        other = start + tl.arange(0, OTHERS)
        there = other < k
        of_other = sortable(tl.load(top + other, mask=there, other=0.0), 32)
        earlier = (of_other[None, :] == key[:, None]) & (other[None, :] < lane[:, None])
        before = there[None, :] & ((of_other[None, :] > key[:, None]) | earlier)
        place += tl.sum(before.to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(ids + place, of_lane, mask=inside)
    tl.store(top + place, z, mask=inside)


@kernel
def count_above_kernel(
    logits,  # (R, C)
    row_stride: "i64",
    classes: "i32",
    of_target,  # (R,)
    counts,  # (R,) int64
    sign: "fp32",
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Count the logits of a row that are larger than its target's, times a sign. NaN is the largest number."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    if ALIGNED:
        logits = tl.multiple_of(logits, 16)
        classes = classes // 8 * 8  # no change, but tells the compiler that it is a multiple of 8
    limit, place, count = tl.load(of_target + row), tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int32)
    ahead = tl.load(logits + place, mask=place < classes, other=0.0)
    for first in range(0, classes, BLOCK):  # the next logits are loaded before these are used
        z, following = ahead.to(tl.float32), first + BLOCK + place
        ahead = tl.load(logits + following, mask=following < classes, other=0.0)
        count += ((first + place < classes) & ((z * sign <= limit) == 0)).to(tl.int32)
    tl.store(counts + row, tl.where(limit == limit, tl.sum(count, 0), 0))
