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

`gradient_product_kernel` shares the tiles and the ring of slots.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = [
    "FLOOR",
    "LOG2E",
    "accumulator",
    "bent",
    "exp2",
    "multiply",
    "place",
    "produce",
    "product_kernel",
    "slots_of",
]

LOG2E = gl.constexpr(1.4426950408889634)
FLOOR = gl.constexpr(-300.0)  # keeps 0 * -inf out of sums: e^(x - largest) is 0 there


@gluon.jit
def exp2(x):
    """Return 2^x; 0 if it is too small for a normal float32."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    """Return 1 / x, to two units in the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _finite(largest):
    """Return `largest`, or 0 if it is -inf, as the reference of exponents."""
    return gl.where(largest == float("-inf"), 0.0, largest)


@gluon.jit
def _fade(c, larger):
    """Return the factor that converts a sum relative to c into one relative to a larger reference."""
    return exp2(gl.minimum(c - larger, 0.0) * LOG2E)


@gluon.jit
def _below(x, softcap):
    """Return 1 / (1 + e^(2 x / k)), from which both the softcap and its slope are computed."""
    return _reciprocal(1 + exp2(x * (2 * LOG2E / softcap)))


@gluon.jit
def bent(z, bend, SCALED: gl.constexpr, CAPPED: gl.constexpr):
    """Return x = k tanh(s z / k), or s z, for bend = (s, k), and dx/dz = s (1 - tanh(s z / k)^2), or s.

    The softcap is computed as k - 2k / (1 + e^(2 s z / k)), which is exact enough for 16-bit logits. The slope does not
    cancel.
    """
    logit_scale, softcap = bend
    x = z
    steep = z
    if SCALED:
        x = x * logit_scale
    if CAPPED:
        below = _below(x, softcap)
        x = softcap - 2 * softcap * below
        steep = 4 * below * (1 - below)
        if SCALED:
            steep = steep * logit_scale
    elif SCALED:
        steep = gl.zeros_like(z) + logit_scale
    return x, steep


_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its former name


@gluon.constexpr_function
def accumulator(classes, warps):
    """Return the layout of a consumer's logits, (rows, classes), in its registers."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, classes, 16])


@gluon.jit
def _next_slot(slot, phase, SLOTS: gl.constexpr):
    """Return the next slot, and the phase of its barrier."""
    slot += 1
    wrapped = slot == SLOTS
    return gl.where(wrapped, 0, slot), phase ^ wrapped.to(gl.int32)


@gluon.jit
def _before(slot, SLOTS: gl.constexpr):
    """Return the previous slot. A variable for it in the loop would be lost by Triton 3.6."""
    return gl.where(slot == 0, SLOTS - 1, slot - 1)


@gluon.jit
def multiply(halves, columns, full, empty, slot, phase, steps, SLOTS: gl.constexpr):
    """Compute the logits (rows, columns) of a tile from `steps` slots. Return them, the next slot and its phase.

    A slot holds slices of the rows, halves (rows, depth), and of the classes, columns (columns, depth).
    """
    HALF: gl.constexpr = halves.shape[1]
    CLASSES: gl.constexpr = columns.shape[1]
    LAYOUT: gl.constexpr = accumulator(CLASSES, gl.num_warps())
    z = gl.zeros([HALF, CLASSES], gl.float32, LAYOUT)
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        z = warpgroup_mma(halves.index(slot), columns.index(slot).permute([1, 0]), z, is_async=True)
        z = warpgroup_mma_wait(1, deps=[z])  # waits for the previous product, after which its slot is free
        mbarrier.arrive(empty.index(_before(slot, SLOTS)), pred=step > 0)
        slot, phase = _next_slot(slot, phase, SLOTS)
    z = warpgroup_mma_wait(0, deps=[z])
    mbarrier.arrive(empty.index(_before(slot, SLOTS)))
    return z, slot, phase


@gluon.jit
def place(unit, walk):
    """Return a unit's band of rows, its first class tile, and the end of its class tiles.

    Units go through a group of bands chunk by chunk. The last group may have fewer bands.
    """
    units, group, chunks, tiles_per_chunk, class_tiles, _steps = walk
    first = unit // (group * chunks) * group
    size = gl.minimum(group, units // chunks - first)
    rest = unit - first * chunks
    begin = rest // size * tiles_per_chunk
    return first + rest % size, begin, gl.minimum(begin + tiles_per_chunk, class_tiles)


@gluon.jit
def slots_of(hidden, classifier, SLOTS: gl.constexpr):
    """Allocate a ring of slots in shared memory, for the upper and lower rows of a tile and for its classes.

    Return also arrays of "full" and "empty" barriers, one a slot. A "full" barrier expects one arrival, an "empty"
    barrier one of each consumer. A fence is needed before the copy engine uses them, or it might find uninitialised
    barriers.
    """
    HALF: gl.constexpr = hidden.block_shape[0]
    CLASSES: gl.constexpr = classifier.block_shape[0]
    DEPTH: gl.constexpr = classifier.block_shape[1]
    upper = gl.allocate_shared_memory(hidden.dtype, [SLOTS, HALF, DEPTH], hidden.layout)
    lower = gl.allocate_shared_memory(hidden.dtype, [SLOTS, HALF, DEPTH], hidden.layout)
    columns = gl.allocate_shared_memory(classifier.dtype, [SLOTS, CLASSES, DEPTH], classifier.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    return upper, lower, columns, full, empty


@gluon.jit
def produce(slots, hidden, classifier, walk, SLOTS: gl.constexpr):
    """Code of the producer, one warp: copy the next slices into a slot as soon as it is free."""
    upper, lower, columns, full, empty = slots
    units, _group, _chunks, _tiles_per_chunk, _class_tiles, steps = walk
    HALF: gl.constexpr = upper.shape[1]
    CLASSES: gl.constexpr = columns.shape[1]
    DEPTH: gl.constexpr = columns.shape[2]
    BYTES: gl.constexpr = (2 * HALF + CLASSES) * DEPTH * columns.dtype.primitive_bitwidth // 8
    slot = 0
    phase = 1
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        band, begin, end = place(unit, walk)
        row = band * (2 * HALF)
        for part in range(begin, end):
            for step in range(steps):
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(full.index(slot), BYTES)
                at = step * DEPTH
                _load(hidden, [row, at], full.index(slot), upper.index(slot))
                _load(hidden, [row + HALF, at], full.index(slot), lower.index(slot))
                _load(classifier, [part * CLASSES, at], full.index(slot), columns.index(slot))
                slot, phase = _next_slot(slot, phase, SLOTS)


@gluon.jit
def _by_lane(x):
    """Reshape a tile (R, C) to (R, C / 8, 4, 2). The second and last axes are within one thread."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def _growth(m, ref):
    """Return the increase of the reference from m to ref, in units of log2; 0 if m is -inf."""
    return gl.where(m == float("-inf"), 0.0, (ref - m) * LOG2E)


@gluon.jit
def _fold(m, s, t, x, ENTROPY: gl.constexpr):
    """Add a tile (R, C) to per-lane sums (R, 4): the largest x, the sum of e, and with ENTROPY the sum of e log2 e."""
    x = _by_lane(x)
    larger = gl.maximum(m, gl.max(gl.max(x, 3), 1))
    ref = _finite(larger)
    e2 = (x - ref[:, None, :, None]) * LOG2E
    e = exp2(e2)
    kept = _fade(_finite(m), ref)
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
    nothing = gl.sum(gl.sum(_by_lane(gl.zeros([HALF, CLASSES], gl.float32, LAYOUT)), 3), 1)
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
        ref = _finite(top)
        kept = _fade(_finite(m), ref[:, None])
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
    slots = slots_of(hidden, classifier, SLOTS)
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
