"""The forward pass on Hopper, in Gluon, if the logits are not needed later: a matrix product that never stores them.

A program computes tiles of logits, 128 rows by 256 classes, one after the other. A producer warp copies slices of both
factors, 64 columns at a time, into a ring of slots in shared memory, with the bulk copy engine and one mbarrier per
slot. Two consumers of four warps have 64 rows each. The tensor cores add the product of a slot to logits in registers.
When a tile is complete, the consumer folds it into its rows' sums. Because of the slots, one consumer can run ahead of
the other, so that one folds while the other multiplies.

A unit of work is a band of 128 rows and a chunk of a few class tiles. Its sums stay in registers until they are
written. `join_kernel` merges the chunks in order. The chunks depend on the vocabulary only, so that a row has the same
bits in every batch. Programs that run at the same time share a few bands and a few hundred classes, which they read
from the L2 cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from xent.backends.triton.hopper.arithmetic import LOG2E, barriers, bent, exp2, fade, finite
from xent.backends.triton.hopper.product_parts import accumulator, by_lane, multiply, place, produce, slots_of

__all__ = ["product_kernel"]

FLOOR = gl.constexpr(-300.0)  # keeps 0 * -inf out of sums: e^(x - largest) is 0 there


@gluon.jit
def _growth(m, ref):
    """Return the increase of the reference from m to ref, in units of log2; 0 if m is -inf."""
    return gl.where(m == float("-inf"), 0.0, (ref - m) * LOG2E)


@gluon.jit
def _fold(m, s, t, x, ENTROPY: gl.constexpr):
    """Add a tile (R, C) to per-lane sums (R, 4): the largest x, the sum of e, and with ENTROPY the sum of e log2 e."""
    x = by_lane(x)
    larger = gl.maximum(m, gl.max(gl.max(x, 3), 1))
    ref = finite(larger)
    e2 = (x - ref[:, None, :, None]) * LOG2E
    e = exp2(e2)
    kept = fade(finite(m), ref)
    if ENTROPY:
        t = kept * (t - _growth(m, ref) * s) + gl.sum(gl.sum(e * gl.maximum(e2, FLOOR), 3), 1)
    return larger, s * kept + gl.sum(gl.sum(e, 3), 1), t


@gluon.jit
def _consume(
    slots, target, sums, rows, vocabulary, walk, bend,
    HALF_INDEX: gl.constexpr, SLOTS: gl.constexpr, SCALED: gl.constexpr, CAPPED: gl.constexpr, ENTROPY: gl.constexpr,
):  # fmt: skip
    """Code of a consumer, four warps: fold one half of the rows of each tile."""
    upper, lower, columns, full, empty = slots
    halves = upper
    if HALF_INDEX == 1:
        halves = lower
    peaks, totals, mixed = sums
    units = walk[0]
    tiles_per_chunk = walk[3]
    HALF: gl.constexpr = upper.shape[1]
    CLASSES: gl.constexpr = columns.shape[1]
    LAYOUT: gl.constexpr = accumulator(CLASSES, gl.num_warps())
    PER_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    inside = gl.arange(0, HALF, layout=PER_ROW)
    classes = gl.arange(0, CLASSES, layout=gl.SliceLayout(0, LAYOUT))
    slot = 0
    phase = 0
    nothing = gl.sum(gl.sum(by_lane(gl.zeros([HALF, CLASSES], gl.float32, LAYOUT)), 3), 1)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        band, begin, end = place(unit, walk)
        row = band * (2 * HALF) + HALF_INDEX * HALF + inside
        y = gl.load(target + row, mask=row < rows, other=-1).to(gl.int32)
        m = nothing + float("-inf")
        s = nothing
        t = nothing
        for part in range(begin, end):
            first = part * CLASSES
            with_target = gl.max(((y >= first) & (y < first + CLASSES)).to(gl.int32), 0)
            z, slot, phase = multiply(halves, columns, full, empty, slot, phase, walk[5], SLOTS)
            x, _steep = bent(z, bend, SCALED, CAPPED)
            if (with_target != 0) | (first + CLASSES > vocabulary):
                others = ((first + classes) < vocabulary)[None, :] & ((first + classes)[None, :] != y[:, None])
                m, s, t = _fold(m, s, t, gl.where(others, x, float("-inf")), ENTROPY)
            else:
                m, s, t = _fold(m, s, t, x, ENTROPY)
        at = (begin // tiles_per_chunk) * rows + row
        top = gl.max(m, 1)
        ref = finite(top)
        kept = fade(finite(m), ref[:, None])
        gl.store(peaks + at, gl.convert_layout(top, PER_ROW), mask=row < rows)
        gl.store(totals + at, gl.convert_layout(gl.sum(s * kept, 1), PER_ROW), mask=row < rows)
        if ENTROPY:
            mix = gl.sum(kept * (t - _growth(m, ref[:, None]) * s), 1)
            gl.store(mixed + at, gl.convert_layout(mix, PER_ROW), mask=row < rows)


@gluon.jit(
    do_not_specialize=["rows", "vocabulary", "units", "group", "chunks", "tiles_per_chunk", "class_tiles", "steps"],
    do_not_specialize_on_alignment=["target", "peaks", "totals", "mixed"],
)
def product_kernel(
    hidden,  # descriptor for the copy engine: (R, D) in blocks of [64, 64]
    classifier,  # descriptor: (V, D) in blocks of [256, 64]
    target,  # (R,) int32, the classes to exclude
    peaks,  # (chunks, R) float32: the largest x of the classes of a chunk, -inf if there was none
    totals,  # (chunks, R) float32: the sum of e = e^(x - largest)
    mixed,  # (chunks, R) float32: the sum of e log2 e, with ENTROPY
    rows,
    vocabulary,
    units,  # units of work: number of chunks times number of bands of 128 rows
    group,  # number of bands that are computed at the same time
    chunks,
    tiles_per_chunk,
    class_tiles,
    steps,
    logit_scale,
    softcap,
    SLOTS: gl.constexpr,
    SCALED: gl.constexpr,
    CAPPED: gl.constexpr,
    ENTROPY: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Compute the sums of all rows; see the module's docstring."""
    upper, lower, columns = slots_of(hidden, classifier, SLOTS)
    full, empty = barriers(SLOTS, 2)
    fence_async_shared()
    slots = (upper, lower, columns, full, empty)
    walk = (units, group, chunks, tiles_per_chunk, class_tiles, steps)
    sums = (peaks, totals, mixed)
    bend = (logit_scale, softcap)
    gl.warp_specialize(
        [
            (_consume, (slots, target, sums, rows, vocabulary, walk, bend, 0, SLOTS, SCALED, CAPPED, ENTROPY)),
            (_consume, (slots, target, sums, rows, vocabulary, walk, bend, 1, SLOTS, SCALED, CAPPED, ENTROPY)),
            (produce, (slots, hidden, classifier, walk, SLOTS)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [REGISTERS, 24],  # and their registers
    )
