"""The kernels of the k most probable classes, and of ranks.

The k blocks of classes with the largest maxima, the first among equals, have the k largest logits, the first among
equals: each of them has a logit that comes before those of any other block. One read of the logits finds the maxima of
blocks of `FAN` classes, and of blocks of `FAN` of these. A second kernel, mostly one warp per row, selects k of the
large blocks, k of the blocks in them, and k of their logits, by bisection in registers.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import exp, finite, tanh
from xent.backends.triton.launches import kernel

__all__ = ["count_above_kernel", "largest_kernel", "maxima_kernel", "sortable"]


FAN = tl.constexpr(16)
OTHERS = tl.constexpr(32)  # logits with which all K are compared at a time


@triton.jit
def sortable(x, BITS: tl.constexpr):
    """Return int32 in the order of float32 numbers: NaN is the largest, and -0 equals 0. Numbers had BITS bits."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, key, 0x7FFFFFFF) >> (32 - BITS)


@triton.jit
def _selected(numbers, places, count, limit, k, low, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Write the places of the k largest numbers to `places` (int32), in ascending order, the first among equals.

    Only numbers in blocks of `FAN` are looked at, those that are the first `count` of `places`, and that are below
    `limit`; if `count` is None, all numbers below it. At least k of them reach the key `low`, or it is the least key.
    Return the k-th largest key.
    """
    LEAST: tl.constexpr = -(2 ** (BITS - 1))
    place = tl.arange(0, SIZE)
    inside = place < limit
    if count is not None:
        inside = place < count * FAN
        place = tl.load(places + place // FAN, mask=inside, other=0) * FAN + place % FAN
        inside = inside & (place < limit)
    key = tl.where(inside, sortable(tl.load(numbers + place, mask=inside, other=0.0).to(tl.float32), BITS), LEAST)
    low, high = tl.maximum(low, tl.min(tl.where(inside, key, -LEAST - 1), 0)), tl.max(key, 0)
    while low < high:  # the k-th largest key is in [low, high]
        middle = (low | high) - ((low ^ high) >> 1)
        reached = tl.sum((key >= middle).to(tl.int32), 0)
        low = tl.where(reached < k, low, middle)
        high = tl.where(reached < k, middle - 1, tl.where(reached == k, middle, high))
    above, equal = key > low, inside & (key == low)
    missing = k - tl.sum(above.to(tl.int32), 0)
    counts = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    equals = counts >> 16
    order = (counts & 0xFFFF) + tl.minimum(equals, missing) - 1
    tl.debug_barrier()
    tl.store(places + order, place, mask=above | (equal & (equals <= missing)))
    tl.debug_barrier()
    return low


@kernel
def maxima_kernel(
    logits,  # (R, C)
    row_stride: "i64",
    classes: "i32",
    small,  # (R, C / FAN) rounded up: the maxima of blocks
    large,  # (R, C / FAN^2) rounded up: of large blocks
    sums,  # (R, parts, 2) float32: the largest x of a part of a row, 0 if it is -inf, and sum_c exp(x_c - it)
    parts: "i32",
    scale: "fp32",
    softcap: "fp32",
    BLOCKS: tl.constexpr,  # large blocks that are read at a time
    STEPS: tl.constexpr,  # how often a part reads as many
    CAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write the maxima of the blocks of a row's part, and the sum of its exponentials. The scale is positive."""
    STEP: tl.constexpr = BLOCKS * FAN * FAN
    program = tl.program_id(0).to(tl.int64)
    row, begin = program // parts, (program % parts).to(tl.int32) * (STEPS * STEP)
    logits += row * row_stride
    if ALIGNED:
        logits = tl.multiple_of(logits, 16)
        classes = classes // 8 * 8  # no change, but tells the compiler that it is a multiple of 8
    small_blocks, large_blocks = tl.cdiv(classes, FAN), tl.cdiv(classes, FAN * FAN)
    small += row * small_blocks
    large += row * large_blocks
    block, fan = tl.arange(0, BLOCKS), tl.arange(0, FAN)
    inner = block[:, None] * FAN + fan[None, :]
    places = inner[:, :, None] * FAN + fan[None, None, :]
    peak = tl.full([BLOCKS], -float("inf"), tl.float32)
    total = tl.zeros([BLOCKS, FAN], tl.float32)
    end = tl.minimum(begin + STEPS * STEP, classes)
    ahead = tl.load(logits + (begin + places), mask=begin + places < end, other=-float("inf"))
    for first in range(begin, end, STEP):  # the next logits are loaded before these are used
        z, following = ahead.to(tl.float32), first + STEP + places
        ahead = tl.load(logits + following, mask=following < end, other=-float("inf"))
        maxima = tl.max(z, 2)
        largest = tl.max(maxima, 1)
        tl.store(small + first // FAN + inner, maxima, mask=inner < small_blocks - first // FAN)
        tl.store(large + first // (FAN * FAN) + block, largest, mask=block < large_blocks - first // (FAN * FAN))
        x, largest = z * scale, largest * scale
        if CAPPED:
            x = tl.where(first + places < classes, softcap * tanh(x / softcap), -float("inf"))
            largest = softcap * tanh(largest / softcap)
        largest = tl.maximum(peak, largest)
        reference = finite(largest)
        total = total * exp(peak - reference)[:, None] + tl.sum(exp(x - reference[:, None, None]), 2)
        peak = largest
    reference = finite(tl.max(peak, 0))
    tl.store(sums + program * 2, reference)
    tl.store(sums + program * 2 + 1, tl.sum(tl.sum(total, 1) * exp(peak - reference), 0))


@kernel
def largest_kernel(
    logits,  # (R, C)
    row_stride: "i64",
    classes: "i32",
    small,  # see `maxima_kernel`
    large,
    sums,
    parts: "i32",
    k: "i32",
    ids,  # (R, k) int64
    top,  # (R, k) float32
    log_sums,  # (R,) float32: log sum_c exp(x_c - the largest x); 0 if all x are -inf
    PARTS: tl.constexpr,  # at least the parts of a row
    LARGE: tl.constexpr,  # at least the large blocks of a row
    PLACES: tl.constexpr,  # at least k
    BITS: tl.constexpr,
):
    """Write the classes of the k largest logits, the largest first, the first among equals, and these logits."""
    LEAST: tl.constexpr = -(2 ** (BITS - 1))
    SIZE: tl.constexpr = PLACES * FAN
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    sums += row * parts * 2
    ids += row * k
    top += row * k
    places = top.to(tl.pointer_type(tl.int32))  # the same memory, until the classes are known
    part = tl.arange(0, PARTS)
    total = tl.load(sums + part * 2 + 1, mask=part < parts, other=0.0)
    peak = tl.where(total == 0, -float("inf"), tl.load(sums + part * 2, mask=part < parts, other=0.0))
    total = tl.sum(total * exp(peak - finite(tl.max(peak, 0))), 0)
    tl.store(log_sums + row, tl.log(tl.where(total == 0, 1.0, total)))
    small_blocks, large_blocks = tl.cdiv(classes, FAN), tl.cdiv(classes, FAN * FAN)
    small += row * small_blocks
    large += row * large_blocks
    count = tl.minimum(k, large_blocks)
    low = _selected(large, places, None, large_blocks, count, LEAST, LARGE, BITS)
    low = tl.where(count == k, low, LEAST)
    low = _selected(small, places, count, small_blocks, tl.minimum(k, small_blocks), low, SIZE, BITS)
    count = tl.minimum(k, small_blocks)
    _selected(logits, places, count, classes, k, tl.where(count == k, low, LEAST), SIZE, BITS)
    # The order of the logits: the number of those that come before each.
    lane = tl.arange(0, PLACES)
    inside = lane < k
    place = tl.load(places + lane, mask=inside, other=0)
    z = tl.load(logits + place, mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()
    tl.store(top + lane, z, mask=inside)
    tl.debug_barrier()
    key, order = sortable(z, 32), tl.zeros([PLACES], tl.int32)
    for start in range(0, k, OTHERS):
        other = start + tl.arange(0, OTHERS)
        there = other < k
        of_other = sortable(tl.load(top + other, mask=there, other=0.0), 32)
        earlier = (of_other[None, :] == key[:, None]) & (other[None, :] < lane[:, None])
        order += tl.sum((there[None, :] & ((of_other[None, :] > key[:, None]) | earlier)).to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(ids + order, place.to(tl.int64), mask=inside)
    tl.store(top + order, z, mask=inside)


@kernel
def count_above_kernel(
    logits,  # (R, C)
    row_stride: "i64",
    classes: "i32",
    of_target,  # (R,)
    counts,  # (R,) int64
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Count the logits of a row that are larger than its target's. NaN is the largest number."""
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
        count += ((first + place < classes) & ((z <= limit) == 0)).to(tl.int32)
    tl.store(counts + row, tl.where(limit == limit, tl.sum(count, 0), 0))
