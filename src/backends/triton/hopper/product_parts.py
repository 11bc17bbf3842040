"""Parts that both matrix product kernels share, in Gluon: tiles, the ring of slots, and the loop over slots."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its former name

__all__ = ["accumulator", "by_lane", "multiply", "next_slot", "place", "produce", "slots_of"]


@gluon.constexpr_function
def accumulator(classes, warps):
    """Return the layout of a consumer's logits, (rows, classes), in its registers."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, classes, 16])


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
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
        slot, phase = next_slot(slot, phase, SLOTS)
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
    """Allocate a ring of slots in shared memory, for the upper and lower rows of a tile and for its classes."""
    HALF: gl.constexpr = hidden.block_shape[0]
    CLASSES: gl.constexpr = classifier.block_shape[0]
    DEPTH: gl.constexpr = classifier.block_shape[1]
    upper = gl.allocate_shared_memory(hidden.dtype, [SLOTS, HALF, DEPTH], hidden.layout)
    lower = gl.allocate_shared_memory(hidden.dtype, [SLOTS, HALF, DEPTH], hidden.layout)
    columns = gl.allocate_shared_memory(classifier.dtype, [SLOTS, CLASSES, DEPTH], classifier.layout)
    return upper, lower, columns


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
                slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def by_lane(x):
    """Reshape a tile (R, C) to (R, C / 8, 4, 2). The second and last axes are within one thread."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])
