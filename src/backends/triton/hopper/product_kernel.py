"""The product of hidden states and classifier on Hopper, in Gluon, which never stores logits: sums, or a gradient.

A program computes tiles of logits, 128 rows by 256 classes, one after the other. A producer warp copies slices of both
factors, 64 columns at a time, into a ring of slots in shared memory, with the bulk copy engine and one mbarrier per
slot. Two consumers of four warps have 64 rows each. The tensor cores add the product of a slot to logits in registers.
When a tile is complete, the consumer folds it into its rows' sums, or stores its gradient. Because of the slots, one
consumer can run ahead of the other, so that one folds while the other multiplies.

A unit of work is a band of 128 rows and a chunk of a few class tiles. Its sums stay in registers until they are
written. `join_kernel` merges the chunks in order. The chunks depend on the vocabulary only, so that a row has the same
bits in every batch. Programs that run at the same time share a few bands and a few hundred classes, which they read
from the L2 cache.

Gradients are computed from the coefficients of `finish_kernel`. For a class c other than the target,

    g_c = e^(x_c - m) (factor + log_factor log2(e) (x_c - m)) dx_c/dz_c.
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

__all__ = ["product_kernel"]

LOG2E = gl.constexpr(1.4426950408889634)
FLOOR = gl.constexpr(-300.0)  # keeps 0 * -inf out of sums: e^(x - largest) is 0 there
_GROUP = gl.constexpr(12)  # bands computed at the same time, whose rows and common classes stay in the L2 cache
_SLOTS = gl.constexpr(4)
_DEAD = gl.constexpr(-2)  # the class of rows whose gradient is 0


@gluon.jit
def _reciprocal(x):
    """Return 1 / x, to two units in the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _finite(largest):
    """Return `largest`, or 0 if it is -inf, as the reference of exponents."""
    return gl.where(largest == float("-inf"), 0.0, largest)


@gluon.jit
def _bent(z, activation, CAPPED: gl.constexpr):
    """Return x = k tanh(s z / k), or s z, for activation = (s, k), and dx/dz / s = 1 - tanh(s z / k)^2, or 1.

    The softcap is computed as k - 2k / (1 + e^(2 s z / k)), which is exact enough for 16-bit logits. The slope does not
    cancel.
    """
    logit_scale, softcap = activation
    x = z * logit_scale
    steep = 1.0
    if CAPPED:
        below = _reciprocal(1 + gl.exp2(x * (2 * LOG2E / softcap)))
        x = softcap - 2 * softcap * below
        steep = 4 * below * (1 - below)
    return x, steep


_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its former name


@gluon.constexpr_function
def _accumulator(classes, warps):
    """Return the layout of a consumer's logits, (rows, classes), in its registers."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, classes, 16])


@gluon.constexpr_function
def _stored(rows, classes):
    """Return the layout for storing a tile: each thread has 8 classes (16 bytes) of a row.

    Converting from `_accumulator` exchanges data between four neighbouring threads of a warp only.
    """
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, 2**bit] for bit in range(5, classes.bit_length() - 1)]
    warps = [[2**bit, 0] for bit in range(4, rows.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], warps, [], [rows, classes])


@gluon.jit
def _multiply(slots, HALF_INDEX: gl.constexpr, turn, steps):
    """Compute the logits (rows, columns) of a tile from `steps` slots. Return them and the next turn.

    A slot holds slices of the rows, two halves (rows, depth), and of the classes, columns (columns, depth). Turn t uses
    slot t modulo their number.
    """
    halves, columns, full, empty = slots
    HALF: gl.constexpr = halves.shape[1]
    CLASSES: gl.constexpr = columns.shape[1]
    z = gl.zeros([HALF, CLASSES], gl.float32, _accumulator(CLASSES, gl.num_warps()))
    for step in range(steps):
        slot = turn % _SLOTS
        mbarrier.wait(full.index(slot), turn // _SLOTS % 2)
        z = warpgroup_mma(halves.index(2 * slot + HALF_INDEX), columns.index(slot).permute([1, 0]), z, is_async=True)
        z = warpgroup_mma_wait(1, deps=[z])  # waits for the previous product, after which its slot is free
        mbarrier.arrive(empty.index((turn + _SLOTS - 1) % _SLOTS), pred=step > 0)
        turn += 1
    z = warpgroup_mma_wait(0, deps=[z])
    mbarrier.arrive(empty.index((turn + _SLOTS - 1) % _SLOTS))
    return z, turn


@gluon.jit
def _place(unit, walk):
    """Return a unit's band of rows, its chunk, its first class tile, and the end of its class tiles.

    Units go through a group of bands chunk by chunk. The last group may have fewer bands.
    """
    units, chunks, tiles, _steps = walk
    first = unit // (_GROUP * chunks) * _GROUP
    size = gl.minimum(_GROUP, units // chunks - first)
    rest = unit - first * chunks
    per_chunk = (tiles + chunks - 1) // chunks
    chunk = rest // size
    return first + rest % size, chunk, chunk * per_chunk, gl.minimum((chunk + 1) * per_chunk, tiles)


@gluon.jit
def _slots_of(hidden, classifier):
    """Allocate a ring of slots in shared memory, for the upper and lower rows of a tile and for its classes.

    Return also arrays of "full" and "empty" barriers, one a slot. A "full" barrier expects one arrival, an "empty"
    barrier one of each consumer. A fence is needed before the copy engine uses them, or it might find uninitialised
    barriers.
    """
    HALF: gl.constexpr = hidden.block_shape[0]
    CLASSES: gl.constexpr = classifier.block_shape[0]
    DEPTH: gl.constexpr = classifier.block_shape[1]
    halves = gl.allocate_shared_memory(hidden.dtype, [2 * _SLOTS, HALF, DEPTH], hidden.layout)
    columns = gl.allocate_shared_memory(classifier.dtype, [_SLOTS, CLASSES, DEPTH], classifier.layout)
    full = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(_SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    return halves, columns, full, empty


@gluon.jit
def _produce(slots, hidden, classifier, walk):
    """Code of the producer, one warp: copy the next slices into a slot as soon as it is free."""
    halves, columns, full, empty = slots
    HALF: gl.constexpr = halves.shape[1]
    CLASSES: gl.constexpr = columns.shape[1]
    DEPTH: gl.constexpr = columns.shape[2]
    BYTES: gl.constexpr = (2 * HALF + CLASSES) * DEPTH * columns.dtype.primitive_bitwidth // 8
    turn = 0
    for unit in range(gl.program_id(0), walk[0], gl.num_programs(0)):
        band, _chunk, begin, end = _place(unit, walk)
        row = band * (2 * HALF)
        for tile in range(begin, end):
            for step in range(walk[3]):
                slot = turn % _SLOTS
                at = step * DEPTH
                mbarrier.wait(empty.index(slot), turn // _SLOTS % 2 ^ 1)
                mbarrier.expect(full.index(slot), BYTES)
                _load(hidden, [row, at], full.index(slot), halves.index(2 * slot))
                _load(hidden, [row + HALF, at], full.index(slot), halves.index(2 * slot + 1))
                _load(classifier, [tile * CLASSES, at], full.index(slot), columns.index(slot))
                turn += 1


@gluon.jit
def _by_lane(x):
    """Reshape a tile (R, C) to (R, C / 8, 4, 2). The second and last axes are within one thread."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def _rebased(m, s, t, ref, MORE: gl.constexpr):
    """Return sums relative to m, which may be -inf, as sums relative to a reference that is not smaller."""
    m = _finite(m)  # where it was -inf, sums are 0
    factor = gl.exp2(gl.minimum(m - ref, 0.0) * LOG2E)
    if MORE:
        t = factor * (t - (ref - m) * LOG2E * s)
    return s * factor, t


@gluon.jit
def _fold(m, s, t, x, MORE: gl.constexpr):
    """Add a tile (R, C) to per-lane sums (R, 4): the largest x, the sum of e, and with MORE the sum of e log2 e."""
    x = _by_lane(x)
    larger = gl.maximum(m, gl.max(gl.max(x, 3), 1))
    ref = _finite(larger)
    e2 = (x - ref[:, None, :, None]) * LOG2E
    e = gl.exp2(e2)
    s, t = _rebased(m, s, t, ref, MORE)
    if MORE:
        t += gl.sum(gl.sum(e * gl.maximum(e2, FLOOR), 3), 1)
    return larger, s + gl.sum(gl.sum(e, 3), 1), t


@gluon.jit
def _consume(
    slots, rest, walk, activation,
    HALF_INDEX: gl.constexpr, CAPPED: gl.constexpr, WRITES: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Code of a consumer, four warps: compute one half of the rows of each tile."""
    target, coefficients, out, rows, vocabulary, pitch8 = rest
    units, chunks, _tiles, steps = walk
    HALF: gl.constexpr = slots[0].shape[1]
    CLASSES: gl.constexpr = slots[1].shape[1]
    LAYOUT: gl.constexpr = _accumulator(CLASSES, gl.num_warps())
    PER_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    STORED: gl.constexpr = _stored(HALF, CLASSES)
    inside = gl.arange(0, HALF, layout=PER_ROW)
    classes = gl.arange(0, CLASSES, layout=gl.SliceLayout(0, LAYOUT))
    stored_rows = gl.arange(0, HALF, layout=gl.SliceLayout(1, STORED))
    stored_classes = gl.arange(0, CLASSES, layout=gl.SliceLayout(0, STORED))
    nothing = gl.sum(gl.sum(_by_lane(gl.zeros([HALF, CLASSES], gl.float32, LAYOUT)), 3), 1)
    turn = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        band, chunk, begin, end = _place(unit, walk)
        first_row = band * (2 * HALF) + HALF_INDEX * HALF
        row = first_row + inside
        valid = row < rows
        y = gl.load(target + row, mask=valid, other=-1)
        m = gl.load(coefficients + row, mask=valid, other=0.0)
        factor = gl.load(coefficients + rows + row, mask=valid, other=0.0) * activation[0]
        of_target = gl.load(coefficients + 2 * rows + row, mask=valid, other=0.0)
        log_factor = gl.load(coefficients + 3 * rows + row, mask=valid, other=0.0) * activation[0]
        line = out + (first_row + stored_rows).to(gl.int64) * (pitch8 * 8)
        if not WRITES:  # the compiler drops the loads
            m = nothing + float("-inf")
        s = nothing
        t = nothing
        for tile in range(begin, end):
            first = tile * CLASSES
            c = first + classes
            special = gl.max((((y >= first) & (y < first + CLASSES)) | (y == _DEAD)).to(gl.int32), 0)
            z, turn = _multiply(slots, HALF_INDEX, turn, steps)
            x, steep = _bent(z, activation, CAPPED)
            if WRITES:
                e2 = (x - m[:, None]) * LOG2E
                g = gl.exp2(e2)
                if MORE:
                    g = g * (factor[:, None] + log_factor[:, None] * gl.maximum(e2, FLOOR))
                else:
                    g = g * factor[:, None]
                if CAPPED:
                    g = g * steep
                if (special != 0) | (first + CLASSES > vocabulary):
                    g = gl.where(c[None, :] == y[:, None], of_target[:, None], g)
                    g = gl.where((c < vocabulary)[None, :] & (y != _DEAD)[:, None], g, 0.0)
                stored = gl.convert_layout(g.to(out.dtype.element_ty), STORED)
                at = first + stored_classes
                mask = (first_row + stored_rows < rows)[:, None] & (at < pitch8 * 8)[None, :]
                gl.store(line[:, None] + at[None, :], stored, mask=mask)
            else:
                if (special != 0) | (first + CLASSES > vocabulary):
                    others = (c < vocabulary)[None, :] & (c[None, :] != y[:, None])
                    x = gl.where(others, x, float("-inf"))
                m, s, t = _fold(m, s, t, x, MORE)
        if not WRITES:
            place = out + (chunk * rows + row)
            top = gl.max(m, 1)
            s, t = _rebased(m, s, t, _finite(top)[:, None], MORE)
            gl.store(place, gl.convert_layout(top, PER_ROW), mask=valid)
            gl.store(place + chunks * rows, gl.convert_layout(gl.sum(s, 1), PER_ROW), mask=valid)
            if MORE:
                gl.store(place + 2 * chunks * rows, gl.convert_layout(gl.sum(t, 1), PER_ROW), mask=valid)


@gluon.jit(
    do_not_specialize=["rows", "vocabulary", "chunks", "pitch8", "steps"],
    do_not_specialize_on_alignment=["target", "coefficients"],
)
def product_kernel(
    hidden,  # descriptor for the copy engine: (R, D) in blocks of [64, 64]
    classifier,  # descriptor: (V, D) in blocks of [256, 64]
    target,  # (R,) int32, the classes to exclude; with WRITES -2 in rows whose gradient is 0
    coefficients,  # with WRITES (4 or more, R) float32: m, factor, the target's gradient, log_factor
    out,  # with WRITES the gradient (R, 8 * pitch8), 16-bit, aligned to 16 bytes, 0 beyond the vocabulary. Otherwise
    # (2 or 3, chunks, R) float32: the largest x of the classes of a chunk, -inf if there was none; the sum of
    # e = e^(x - largest); and with MORE that of e log2 e
    rows,
    vocabulary,
    chunks,
    pitch8,
    steps,  # slices of the width
    logit_scale,
    softcap,
    CAPPED: gl.constexpr,
    WRITES: gl.constexpr,
    MORE: gl.constexpr,  # there is an entropy; with WRITES: a log_factor, which may be 0
):
    """Compute the sums or the gradients of all rows; see the module's docstring."""
    slots = _slots_of(hidden, classifier)
    bands = (rows + 2 * hidden.block_shape[0] - 1) // (2 * hidden.block_shape[0])
    tiles = (vocabulary + classifier.block_shape[0] - 1) // classifier.block_shape[0]
    walk = (bands * chunks, chunks, tiles, steps)
    rest = (target, coefficients, out, rows, vocabulary, pitch8)
    activation = (logit_scale, softcap)
    gl.warp_specialize(
        [
            (_consume, (slots, rest, walk, activation, 0, CAPPED, WRITES, MORE)),
            (_consume, (slots, rest, walk, activation, 1, CAPPED, WRITES, MORE)),
            (_produce, (slots, hidden, classifier, walk)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # and their registers
    )
