"""Kernels for one rank's classes: the sums that it sends to the other ranks (one program per row), and the gradient.

The names, meaning and order of the sums are in `xent.backends.torch.sharded.sums`. The target is only in its own slot,
which has its raw logit.
Logits are read once: the reference of a row is the largest x of its first block without the target. Only rows whose sum
relative to it is less than 1/2, or too large, are read again with the largest x of all classes.

Exponents are (x - reference) * log2(e), with the subtraction first, for 16-bit logits too (EXACT in `row_fold`). The
ranks' references differ, so the rounding error of reference * log2(e) would not cancel between ranks.
"""

import triton
import triton.language as tl

from xent.backends.triton.launch import kernel
from xent.backends.triton.maths import FLOOR, LN2, NOWHERE, activate, exp, exponent, order, times
from xent.backends.triton.row_algebra import bend_of_row
from xent.backends.triton.row_fold import careful_sums, lane_of_target, quick_sums, turn
from xent.backends.triton.row_gradient import write_gradient
from xent.backends.triton.row_memory import fetch, fill

__all__ = ["shard_fold_kernel", "shard_gradient_kernel"]

# With a sum of at least 1/2, log(sum + e^(target - reference)) does not cancel, whichever term is larger.
LEAST = tl.constexpr(0.5)
LARGEST = tl.constexpr(1e18)


@triton.jit
def _joined(
    s, t, u, q, v, off, lane, inside, z, classes, reference, class_weight, logit_scale, softcap,
    LANES: tl.constexpr, SKEWED: tl.constexpr, QUICK: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    WEIGHED: tl.constexpr, ENTROPY: tl.constexpr, SQUARED: tl.constexpr, AVERAGED: tl.constexpr,
):  # fmt: skip
    """Return the sums over all lanes without the target. Its lane is summed again, as in `row_fold.joined`."""
    others = tl.arange(0, LANES) != lane
    x = tl.where(inside, activate(z.to(tl.float32), logit_scale, softcap, SCALED, CAPPED, QUICK), -float("inf"))
    e2 = exponent(x, reference, True)
    e = tl.math.exp2(e2)
    total = tl.sum(tl.where(others, turn(s, off, LANES) if SKEWED else s, 0.0), 0) + tl.sum(e, 0)
    mixed = 0.0
    if ENTROPY:
        mixed = tl.sum(tl.where(others, turn(t, off, LANES) if SKEWED else t, 0.0), 0)
        mixed += tl.sum(e * tl.maximum(e2, FLOOR), 0)
    below = 0.0
    if WEIGHED:
        below = tl.sum(tl.where(others, turn(u, off, LANES) if SKEWED else u, 0.0), 0)
        if class_weight is not None:
            below -= tl.sum(times(tl.load(class_weight + classes, mask=inside, other=0.0), e2), 0)
        else:
            below -= tl.sum(tl.where(inside, e2, 0.0), 0)
    squares = 0.0
    if SQUARED:
        squares = tl.sum(tl.where(others, turn(q, off, LANES) if SKEWED else q, 0.0), 0) + tl.sum(e * e, 0)
    level = 0.0
    if AVERAGED:
        level = tl.sum(tl.where(others, turn(v, off, LANES) if SKEWED else v, 0.0), 0)
        level += tl.sum(tl.where(inside, x, 0.0), 0)
    return total, mixed, below, squares, level


@kernel
def shard_fold_kernel(
    logits,  # (R, C), rows `logits_row` apart
    logits_row: "i64",
    skew: "i64",  # offset of `logits` from a multiple of 16 bytes, in elements
    sums,  # (K, R) float32, rows `slot` apart
    slot: "i64",
    local,  # (N,) int64: targets relative to this shard; outside of [0, C) if another rank has them
    class_weight,  # (C,) float32 or None
    target_logits,  # (R,) float32 or None: replace the targets' raw logits
    start: "i64",  # index of the first row in the N rows
    count: "i64",  # N
    first_class: "i32",
    classes_here: "i32",  # C
    softcap: "fp32",
    logit_scale: "fp32",
    bend,  # (N, 2): logit scale and softcap of each row; or None
    bend_stride: "i64",
    BELOW: tl.constexpr,  # these are slots of `sums`, -1 if not needed
    MIXED: tl.constexpr,
    SQUARES: tl.constexpr,
    DEFICIT: tl.constexpr,
    KEY: tl.constexpr,
    SKEWED: tl.constexpr,  # these are described in `rows_kernel`
    RAGGED: tl.constexpr,
    VECTOR: tl.constexpr,
    WHOLE: tl.constexpr,
    QUICK: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the sums of one row."""
    WEIGHED: tl.constexpr = BELOW >= 0
    ENTROPY: tl.constexpr = MIXED >= 0
    SQUARED: tl.constexpr = SQUARES >= 0
    AVERAGED: tl.constexpr = DEFICIT >= 0
    PREDICTED: tl.constexpr = KEY >= 0
    here = tl.program_id(0).to(tl.int64)
    row = start + here
    softcap, logit_scale = bend_of_row(row, bend, bend_stride, softcap, logit_scale, count, 0, False)
    target = tl.load(local + row)
    owned = (target >= 0) & (target < classes_here)
    y = tl.where(owned, target, classes_here).to(tl.int32)
    begin = here * logits_row
    off = 0
    if SKEWED:
        off = ((skew + begin) % VECTOR).to(tl.int32)
    source = tl.multiple_of(logits + (begin - off), 16) if VECTOR > 1 else logits + begin
    last = (classes_here + off - 1) // BLOCK * BLOCK
    whole = (classes_here + off + VECTOR - 1) // VECTOR * VECTOR
    first_block = fetch(source, 0, whole, BLOCK, VECTOR, "evict_last")
    second_block = fetch(source, BLOCK, whole, BLOCK, VECTOR, "evict_last")
    if target_logits is None:
        z_y = tl.load(logits + begin + y, mask=owned, other=0.0).to(tl.float32)
    else:
        z_y = tl.load(target_logits + here)

    lane, classes, in_lane, z_lane = lane_of_target(True, source, off, y, classes_here, BLOCK, LANES, BLOCKS)
    m, _exact, s, t, u, q, v, best, at = quick_sums(
        source, first_block, second_block, off, last, whole, classes_here, y, class_weight, logit_scale, softcap,
        BLOCK, LANES, BLOCKS, WHOLE, SKEWED, RAGGED, VECTOR, True, QUICK, SCALED, CAPPED, WEIGHED, ENTROPY,
        SQUARED, AVERAGED, PREDICTED,
    )  # fmt: skip
    total, mixed, below, squares, level = _joined(
        s, t, u, q, v, off, lane, in_lane, z_lane, classes, m, class_weight, logit_scale, softcap,
        LANES, SKEWED, QUICK, SCALED, CAPPED, WEIGHED, ENTROPY, SQUARED, AVERAGED,
    )  # fmt: skip
    if ((total >= LEAST) & (total < LARGEST)) == 0:
        m, _exact, s, t, u, q, v = careful_sums(
            source, off, last, whole, classes_here, y, -float("inf"), class_weight, logit_scale, softcap,
            BLOCK, LANES, RAGGED, VECTOR, True, QUICK, SCALED, CAPPED, WEIGHED, ENTROPY, SQUARED, AVERAGED,
        )  # fmt: skip
        total, mixed, below, squares, level = _joined(
            s, t, u, q, v, off, lane, in_lane, z_lane, classes, m, class_weight, logit_scale, softcap,
            LANES, SKEWED, QUICK, SCALED, CAPPED, WEIGHED, ENTROPY, SQUARED, AVERAGED,
        )  # fmt: skip

    place = sums + here
    tl.store(place, tl.where(total == 0, -float("inf"), m))
    tl.store(place + slot, total)
    tl.store(place + 2 * slot, tl.where(owned, z_y, 0.0))
    if WEIGHED:
        tl.store(place + BELOW * slot, below * LN2)
    if ENTROPY:
        tl.store(place + MIXED * slot, mixed * LN2)
    if SQUARED:
        tl.store(place + SQUARES * slot, squares)
    if AVERAGED:
        x_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED, False)
        counted = tl.where(owned, classes_here - 1, classes_here).to(tl.float32)
        tl.store(place + DEFICIT * slot, counted * m - level + tl.where(owned, m - x_y, 0.0))
    if PREDICTED:
        top = tl.max(best, 0)
        block = tl.min(tl.where(best == top, at, NOWHERE), 0)
        z = fetch(source, block, whole, BLOCK, VECTOR, "evict_first")
        ids = block + tl.arange(0, BLOCK) - off
        inside = (ids >= 0) & (ids < classes_here)
        found = tl.min(tl.where(inside & (order(z, inside, logit_scale, SCALED) == top), ids, NOWHERE), 0)
        tl.store(place + KEY * slot, top)
        tl.store(place + (KEY + 1) * slot, (first_class + found).to(tl.float32, bitcast=True))


@kernel
def shard_gradient_kernel(
    logits,  # see `shard_fold_kernel` for arguments that are not described here
    logits_row: "i64",
    skew: "i64",
    grad,  # (R, C), may be the logits; aligned like them
    grad_row: "i64",
    peak,  # (R,) float32, like the next ones; see `xent.backends.torch.sharded.steps.Coefficients`
    log_sum,
    alpha,
    beta,  # or None
    delta,  # or None
    target,
    zero,  # (R,) bool or None
    local,
    class_weight,
    start: "i64",
    count: "i64",
    classes_here: "i32",
    softcap: "fp32",
    logit_scale: "fp32",
    bend,
    bend_stride: "i64",
    SKEWED: tl.constexpr,
    RAGGED: tl.constexpr,
    VECTOR: tl.constexpr,
    QUICK: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of one block of one row."""
    TILTED: tl.constexpr = beta is not None
    SMOOTHED: tl.constexpr = delta is not None
    blocks = tl.cdiv(classes_here + (VECTOR - 1 if SKEWED else 0), BLOCK)
    here = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK
    row = start + here
    begin = here * logits_row
    off = 0
    if SKEWED:
        off = ((skew + begin) % VECTOR).to(tl.int32)
    source = tl.multiple_of(logits + (begin - off), 16) if VECTOR > 1 else logits + begin
    place = grad + (here * grad_row - off)
    if VECTOR > 1:
        place = tl.multiple_of(place, 16)
    skipped = False
    if zero is not None:
        skipped = tl.load(zero + here) != 0
    if skipped:
        fill(place, 0.0, off, first, first, classes_here, BLOCK, RAGGED, VECTOR)
    else:
        whole = (classes_here + off + VECTOR - 1) // VECTOR * VECTOR
        softcap, logit_scale = bend_of_row(row, bend, bend_stride, softcap, logit_scale, count, 0, False)
        shift = tl.load(log_sum + here)
        part = exp(-shift)
        factor = tl.load(alpha + here) * part
        tilt = 0.0
        if TILTED:
            row_beta = tl.load(beta + here) * part
            factor -= row_beta * shift
            tilt = row_beta * LN2
        row_delta = 0.0
        if SMOOTHED:
            row_delta = tl.load(delta + here)
        write_gradient(
            source, place, off, first, first, classes_here, whole, tl.load(peak + here), True, factor, tilt, row_delta,
            class_weight, logit_scale, softcap, BLOCK, RAGGED, VECTOR, SKEWED, False, True, QUICK, SCALED, CAPPED,
            SMOOTHED, TILTED, False,
        )  # fmt: skip
        y = tl.load(local + row)
        if (y >= 0) & (y < classes_here) & (y + off >= first) & (y + off < first + BLOCK):
            tl.debug_barrier()
            tl.store(place + (off + y), tl.load(target + here).to(grad.dtype.element_ty))
