"""total += left^T right on Hopper, in Gluon: a matrix product that adds to what is there, behind its own multiplying.

What the classifier's gradient is summed with, chunk by chunk: left are the gradients of logits (R, V), right the hidden
states (R, D). The sum of a chunk's product and of what is there is rounded to bfloat16 once, where a library's was
found to be rounded more, in about a library's time.

Programs, tiles and the ring of slots are those of the product kernel (`product_kernel`), with one more buffer for each
consumer. The producer copies a consumer's part of the total there while the tile is being multiplied; the consumer adds
its registers to it, and the copy engine writes it back while the next tile is being multiplied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from xent.backends.triton.product_parts import last_product, multiply, next_slot
from xent.backends.triton.ring_parts import barriers

__all__ = ["sum_kernel"]


@gluon.jit
def _produce(slots, totals, left, right, total, walk, SLOTS: gl.constexpr):
    """One warp: every free slot starts to load the next slices at once."""
    upper, lower, columns, full, empty = slots
    parts, there, free = totals
    tiles, across, steps = walk
    DEPTH: gl.constexpr = upper.shape[1]
    HALF: gl.constexpr = upper.shape[2]
    WIDTH: gl.constexpr = columns.shape[2]
    BYTES: gl.constexpr = DEPTH * (2 * HALF + WIDTH) * columns.dtype.primitive_bitwidth // 8
    PART_BYTES: gl.constexpr = HALF * WIDTH * columns.dtype.primitive_bitwidth // 8
    # By then both consumers have begun with the tile, and have written the one before.
    late = gl.minimum(SLOTS, steps - 1)
    slot = 0
    phase = 1
    part_phase = 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = tile // across * (2 * HALF)
        column = tile % across * WIDTH
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), BYTES)
            at = step * DEPTH
            tma.async_copy_global_to_shared(left, [at, row], full.index(slot), upper.index(slot))
            tma.async_copy_global_to_shared(left, [at, row + HALF], full.index(slot), lower.index(slot))
            tma.async_copy_global_to_shared(right, [at, column], full.index(slot), columns.index(slot))
            slot, phase = next_slot(slot, phase, SLOTS)
            now = step == late
            for half in gl.static_range(2):
                mbarrier.wait(free.index(half), part_phase, pred=now)
                mbarrier.expect(there.index(half), PART_BYTES, pred=now)
                place = [row + half * HALF, column]
                tma.async_copy_global_to_shared(total, place, there.index(half), parts.index(half), pred=now)
        part_phase ^= 1


@gluon.jit
def _consume(slots, totals, total, walk, half: gl.constexpr, SLOTS: gl.constexpr):
    """Four warps: one half of the rows of each tile."""
    upper, lower, columns, full, empty = slots
    parts, there, free = totals
    halves = upper
    if half == 1:
        halves = lower
    tiles, across, steps = walk
    HALF: gl.constexpr = upper.shape[2]
    WIDTH: gl.constexpr = columns.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, WIDTH, 16]
    )
    part = parts.index(half)
    slot = 0
    phase = 0
    part_phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        z = gl.zeros([HALF, WIDTH], gl.float32, LAYOUT)
        z, slot, phase = multiply(z, halves, columns, full, empty, slot, phase, steps, SLOTS, True)
        z = last_product(z, empty, slot, SLOTS)
        mbarrier.wait(there.index(half), part_phase)
        part.store((z + part.load(LAYOUT).to(gl.float32)).to(columns.dtype))
        fence_async_shared()
        place = [tile // across * (2 * HALF) + half * HALF, tile % across * WIDTH]
        tma.async_copy_shared_to_global(total, place, part)
        tma.store_wait(0)
        mbarrier.arrive(free.index(half))
        part_phase ^= 1


@gluon.jit(do_not_specialize=["tiles", "across", "steps"])
def sum_kernel(
    left,  # for the copy engine: (R, V) in blocks of [64, 64]
    right,  # (R, D) in blocks of [64, 256]
    total,  # (V, D) in blocks of [64, 256]
    tiles,
    across,  # of them beside each other
    steps,
    SLOTS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Add to all tiles; see the module's docstring."""
    DEPTH: gl.constexpr = left.block_shape[0]
    HALF: gl.constexpr = left.block_shape[1]
    WIDTH: gl.constexpr = right.block_shape[1]
    upper = gl.allocate_shared_memory(left.dtype, [SLOTS, DEPTH, HALF], left.layout)
    lower = gl.allocate_shared_memory(left.dtype, [SLOTS, DEPTH, HALF], left.layout)
    columns = gl.allocate_shared_memory(right.dtype, [SLOTS, DEPTH, WIDTH], right.layout)
    parts = gl.allocate_shared_memory(total.dtype, [2, HALF, WIDTH], total.layout)
    full, empty = barriers(SLOTS, 2)
    there, free = barriers(2, 1)
    fence_async_shared()
    slots = (upper, lower, columns, full, empty)
    totals = (parts, there, free)
    walk = (tiles, across, steps)
    gl.warp_specialize(
        [
            (_consume, (slots, totals, total, walk, 0, SLOTS)),
            (_consume, (slots, totals, total, walk, 1, SLOTS)),
            (_produce, (slots, totals, left, right, total, walk, SLOTS)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [REGISTERS, 24],  # and their registers
    )
