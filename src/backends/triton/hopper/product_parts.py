"""What the kernels that multiply share, in Gluon: tiles and a ring of slots, and how the tensor cores go through it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

__all__ = ["by_lane", "last_product", "multiply", "next_slot", "place", "produce"]


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """Return the slot after this one, and the phase of its barrier."""
    slot += 1
    wrapped = slot == SLOTS
    return gl.where(wrapped, 0, slot), phase ^ wrapped.to(gl.int32)


@gluon.jit
def _before(slot, SLOTS: gl.constexpr):
    """Return the slot before this one: found anew where a loop needs it, for Triton 3.6 loses a variable with it."""
    return gl.where(slot == 0, SLOTS - 1, slot - 1)


@gluon.jit
def multiply(z, halves, columns, full, empty, slot, phase, steps, SLOTS: gl.constexpr):
    """Add the products of so many slots to z, the last of them still in flight; return z, the next slot and its phase.

    Slots hold halves (rows, depth) and columns (columns, depth).
    """
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        z = warpgroup_mma(halves.index(slot), columns.index(slot).permute([1, 0]), z, is_async=True)
        z = warpgroup_mma_wait(1, deps=[z])  # for the one before, whose slot nobody reads any more
        mbarrier.arrive(empty.index(_before(slot, SLOTS)), pred=step > 0)
        slot, phase = next_slot(slot, phase, SLOTS)
    return z, slot, phase


@gluon.jit
def last_product(z, empty, slot, SLOTS: gl.constexpr):
    """Return z when the product in flight is there, whose slot is the one before."""
    z = warpgroup_mma_wait(0, deps=[z])
    mbarrier.arrive(empty.index(_before(slot, SLOTS)))
    return z


@gluon.jit
def place(tile, walk):
    """Return which band of rows and which classes a tile has, both counted in tiles: a group of bands, class by class.

    The last group may be smaller.
    """
    tiles, group, class_tiles, _steps = walk
    first = tile // (group * class_tiles) * group
    size = gl.minimum(group, tiles // class_tiles - first)
    rest = tile - first * class_tiles
    return first + rest % size, rest // size


@gluon.jit
def produce(slots, hidden, classifier, walk, SLOTS: gl.constexpr):
    """One warp: every free slot starts to load the next slices at once."""
    upper, lower, columns, full, empty = slots
    tiles, _group, _class_tiles, steps = walk
    HALF: gl.constexpr = upper.shape[1]
    CLASSES: gl.constexpr = columns.shape[1]
    DEPTH: gl.constexpr = columns.shape[2]
    BYTES: gl.constexpr = (2 * HALF + CLASSES) * DEPTH * columns.dtype.primitive_bitwidth // 8
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        band, part = place(tile, walk)
        row = band * (2 * HALF)
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), BYTES)
            at = step * DEPTH
            tma.async_copy_global_to_shared(hidden, [row, at], full.index(slot), upper.index(slot))
            tma.async_copy_global_to_shared(hidden, [row + HALF, at], full.index(slot), lower.index(slot))
            tma.async_copy_global_to_shared(classifier, [part * CLASSES, at], full.index(slot), columns.index(slot))
            slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def by_lane(x):
    """Return a tile (R, C) as (R, C / 8, 4, 2), of which the second and last axes lie within a thread."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])
