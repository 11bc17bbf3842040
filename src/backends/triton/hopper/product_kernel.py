"""The forward pass on Hopper where nothing needs the logits again, in Gluon: a matrix product that stores none of them.

A program makes tiles of logits, 128 rows by 256 classes, one after the other. A producer warp copies slices of both
factors, 64 of their columns at a time, into a ring of slots in shared memory (the bulk copy engine, one mbarrier a
slot). Two consumers of four warps have 64 rows each: the tensor cores add a slot's product to logits that are their
registers, and when a tile is complete a consumer folds it into its rows' (largest, sum of exponentials). The slots let
one consumer run ahead of the other, so that one folds while the other multiplies.

Tiles are dealt out so that a program stays with its rows and carries their sums in registers: GROUP bands of 128 rows
are worked on at a time, class by class, and GROUP divides the number of programs. What programs side by side read, a
few bands and a few hundred classes each, comes from the L2 cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from xent.backends.triton.hopper.arithmetic import activate, barriers, exp, fade, finite
from xent.backends.triton.hopper.product_parts import by_lane, last_product, multiply, place, produce

__all__ = ["product_kernel"]


@gluon.jit
def _fold(m, s, x):
    """Return the largest x so far of each row and lane, (R, 4), and the sum of e^(x - largest), with a tile (R, C)."""
    x = by_lane(x)
    larger = gl.maximum(m, gl.max(gl.max(x, 3), 1))
    ref = finite(larger)
    e = exp(x - ref[:, None, :, None])
    return larger, s * fade(finite(m), ref) + gl.sum(gl.sum(e, 3), 1)


@gluon.jit
def _consume(
    slots,
    target,
    sums,
    rows,
    vocabulary,
    walk,
    bend,
    HALF_INDEX: gl.constexpr,
    SLOTS: gl.constexpr,
    SCALED: gl.constexpr,
    CAPPED: gl.constexpr,
):
    """Four warps: one half of the rows of each tile."""
    upper, lower, columns, full, empty = slots
    halves = upper
    if HALF_INDEX == 1:
        halves = lower
    peaks, totals = sums
    tiles, group, class_tiles, steps = walk
    HALF: gl.constexpr = upper.shape[1]
    CLASSES: gl.constexpr = columns.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, CLASSES, 16]
    )
    PER_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    inside = gl.arange(0, HALF, layout=PER_ROW)
    classes = gl.arange(0, CLASSES, layout=gl.SliceLayout(0, LAYOUT))
    members = gl.num_programs(0) // group
    slot = 0
    phase = 0
    nothing = gl.sum(gl.sum(by_lane(gl.zeros([HALF, CLASSES], gl.float32, LAYOUT)), 3), 1)
    m = nothing + float("-inf")
    s = nothing
    y = gl.full([HALF], -1, gl.int32, PER_ROW)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        band, part = place(tile, walk)
        row = band * (2 * HALF) + HALF_INDEX * HALF + inside
        if part < members:
            m = nothing + float("-inf")
            s = nothing
            y = gl.load(target + row, mask=row < rows, other=-1).to(gl.int32)
        z = gl.zeros([HALF, CLASSES], gl.float32, LAYOUT)
        z, slot, phase = multiply(z, halves, columns, full, empty, slot, phase, steps, SLOTS)
        first = part * CLASSES
        with_target = gl.max(((y >= first) & (y < first + CLASSES)).to(gl.int32), 0)
        z = last_product(z, empty, slot, SLOTS)
        x = activate(z, bend, SCALED, CAPPED)
        if (with_target != 0) | (first + CLASSES > vocabulary):
            others = ((first + classes) < vocabulary)[None, :] & ((first + classes)[None, :] != y[:, None])
            m, s = _fold(m, s, gl.where(others, x, float("-inf")))
        else:
            m, s = _fold(m, s, x)
        if part + members >= class_tiles:
            at = (part % members) * rows + row
            top = gl.max(m, 1)
            total = gl.sum(s * fade(finite(m), finite(top)[:, None]), 1)
            gl.store(peaks + at, gl.convert_layout(top, PER_ROW), mask=row < rows)
            gl.store(totals + at, gl.convert_layout(total, PER_ROW), mask=row < rows)


@gluon.jit(
    do_not_specialize=["rows", "vocabulary", "tiles", "group", "class_tiles", "steps"],
    do_not_specialize_on_alignment=["target", "peaks", "totals"],
)
def product_kernel(
    hidden,  # for the copy engine: (R, D) in blocks of [64, 64]
    classifier,  # (V, D) in blocks of [256, 64]
    target,  # (R,) int32, classes that are left out
    peaks,  # (programs / group, R) float32: the largest x of the classes that a program had, -inf where there was none
    totals,  # and their sum of e^(x - largest)
    rows,
    vocabulary,
    tiles,
    group,  # of bands, which divides the programs; and as many bands as these tiles have are a multiple of it
    class_tiles,
    steps,
    softcap,
    logit_scale,
    SLOTS: gl.constexpr,
    SCALED: gl.constexpr,
    CAPPED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Fold all logits of all rows; see the module's docstring."""
    HALF: gl.constexpr = hidden.block_shape[0]
    CLASSES: gl.constexpr = classifier.block_shape[0]
    DEPTH: gl.constexpr = classifier.block_shape[1]
    upper = gl.allocate_shared_memory(hidden.dtype, [SLOTS, HALF, DEPTH], hidden.layout)
    lower = gl.allocate_shared_memory(hidden.dtype, [SLOTS, HALF, DEPTH], hidden.layout)
    columns = gl.allocate_shared_memory(classifier.dtype, [SLOTS, CLASSES, DEPTH], classifier.layout)
    full, empty = barriers(SLOTS, 2)
    fence_async_shared()
    slots = (upper, lower, columns, full, empty)
    walk = (tiles, group, class_tiles, steps)
    sums = (peaks, totals)
    bend = (logit_scale, softcap)
    gl.warp_specialize(
        [
            (_consume, (slots, target, sums, rows, vocabulary, walk, bend, 0, SLOTS, SCALED, CAPPED)),
            (_consume, (slots, target, sums, rows, vocabulary, walk, bend, 1, SLOTS, SCALED, CAPPED)),
            (produce, (slots, hidden, classifier, walk, SLOTS)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [REGISTERS, 24],  # and their registers
    )
