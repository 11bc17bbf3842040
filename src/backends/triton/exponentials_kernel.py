"""The forward pass on Hopper where gradients follow, in Gluon: a matrix product that stores e^(x - reference).

Programs, tiles and the ring of slots are those of the product kernel (`product_kernel`). When a tile of logits is
complete, a consumer turns its registers into exponentials relative to a number that each row was given beforehand, adds
them up, and has the copy engine write them while the next tile is being multiplied. The target's is 0, and left out of
the sum. What a softcap's slope is to the gradient is multiplied in after the sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from xent.backends.triton.product_parts import last_product, multiply, place, produce
from xent.backends.triton.ring_parts import activate, barriers, exp

__all__ = ["exponentials_kernel"]


@gluon.jit
def _write(z, row_facts, corner, part, out, vocabulary, masked, bend, SCALED: gl.constexpr, CAPPED: gl.constexpr):
    """Write the exponentials of logits (R, C); return each row's largest x and the sum of its exponentials."""
    y, c, alive = row_facts
    row, first = corner
    _logit_scale, softcap = bend
    PER_ROW: gl.constexpr = gl.SliceLayout(1, z.type.layout)
    PER_COLUMN: gl.constexpr = gl.SliceLayout(0, z.type.layout)
    x = activate(z, bend, SCALED, CAPPED)
    if masked:
        classes = first + gl.arange(0, z.shape[1], layout=PER_COLUMN)
        others = (classes < vocabulary)[None, :] & (classes[None, :] != gl.convert_layout(y, PER_ROW)[:, None])
        x = gl.where(others, x, float("-inf"))
    e = exp(x - gl.convert_layout(c, PER_ROW)[:, None])
    top = gl.max(x, 1)
    total = gl.sum(e, 1)
    if CAPPED:
        bent = x / softcap
        e = gl.where(e == 0, 0.0, e * (1 - bent * bent))
    e = gl.where(gl.convert_layout(alive, PER_ROW)[:, None], e, 0.0)
    tma.store_wait(0)
    part.store(e.to(part.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, first], part)
    return top, total


@gluon.jit
def _consume(
    slots,
    parts,
    out,
    facts,
    sums,
    counts,
    walk,
    bend,
    HALF_INDEX: gl.constexpr,
    SLOTS: gl.constexpr,
    SUMMED: gl.constexpr,
    SCALED: gl.constexpr,
    CAPPED: gl.constexpr,
):
    """Four warps: one half of the rows of each tile."""
    upper, lower, columns, full, empty = slots
    halves = upper
    if HALF_INDEX == 1:
        halves = lower
    target, reference, dead = facts
    peaks, totals = sums
    rows, vocabulary, first_class, first_tile = counts
    tiles, _group, _class_tiles, steps = walk
    HALF: gl.constexpr = upper.shape[1]
    CLASSES: gl.constexpr = columns.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, CLASSES, 16]
    )
    PER_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    inside = gl.arange(0, HALF, layout=PER_ROW)
    part = parts.index(HALF_INDEX)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        band, class_tile = place(tile, walk)
        here = band * (2 * HALF) + HALF_INDEX * HALF
        first = class_tile * CLASSES
        row = here + inside
        y = gl.load(target + row, mask=row < rows, other=-1).to(gl.int32) - first_class
        c = gl.load(reference + row, mask=row < rows, other=0.0)
        alive = gl.load(dead + row, mask=row < rows, other=1) == 0
        with_target = gl.max(((y >= first) & (y < first + CLASSES)).to(gl.int32), 0)
        z = gl.zeros([HALF, CLASSES], gl.float32, LAYOUT)
        z, slot, phase = multiply(z, halves, columns, full, empty, slot, phase, steps, SLOTS)
        z = last_product(z, empty, slot, SLOTS)
        left, right = z.reshape([HALF, 2, CLASSES // 2]).permute([0, 2, 1]).split()
        masked = (with_target != 0) | (first + CLASSES > vocabulary)
        row_facts = (y, c, alive)
        corner = (here, first)
        top, total = _write(left, row_facts, corner, part, out, vocabulary, masked, bend, SCALED, CAPPED)
        corner = (here, first + CLASSES // 2)
        more_top, more = _write(right, row_facts, corner, part, out, vocabulary, masked, bend, SCALED, CAPPED)
        top = gl.convert_layout(gl.maximum(top, more_top), PER_ROW)
        total = gl.convert_layout(total + more, PER_ROW)
        at = (first_tile + class_tile) * rows + row
        if SUMMED:
            gl.store(peaks + at, top, mask=row < rows)
            gl.store(totals + at, total, mask=row < rows)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["rows", "vocabulary", "first_class", "first_tile", "tiles", "group", "class_tiles", "steps"],
    do_not_specialize_on_alignment=["target", "reference", "dead", "todo", "peaks", "totals"],
)
def exponentials_kernel(
    hidden,  # for the copy engine: (R, D) in blocks of [64, 64]
    classifier,  # (C, D) in blocks of [256, 64]: classes first_class, first_class + 1, ...
    out,  # (R, C) in blocks of [64, 128]
    target,  # (R,) int64, classes that are left out
    reference,  # (R,) float32
    dead,  # (R,) bool: rows of 0
    todo,  # () int32: 1, or 0 to do nothing at all
    peaks,  # (T, R) float32: the largest x of each row in each tile of classes
    totals,  # and the sum of e^(x - reference)
    rows,
    vocabulary,  # C
    first_class,
    first_tile,  # of those of all classes
    tiles,
    group,  # of bands
    class_tiles,
    steps,
    softcap,
    logit_scale,
    SLOTS: gl.constexpr,
    SUMMED: gl.constexpr,  # or peaks, totals and todo are not looked at
    SCALED: gl.constexpr,
    CAPPED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Write the exponentials of all rows and add them up; see the module's docstring."""
    HALF: gl.constexpr = hidden.block_shape[0]
    CLASSES: gl.constexpr = classifier.block_shape[0]
    DEPTH: gl.constexpr = classifier.block_shape[1]
    upper = gl.allocate_shared_memory(hidden.dtype, [SLOTS, HALF, DEPTH], hidden.layout)
    lower = gl.allocate_shared_memory(hidden.dtype, [SLOTS, HALF, DEPTH], hidden.layout)
    columns = gl.allocate_shared_memory(classifier.dtype, [SLOTS, CLASSES, DEPTH], classifier.layout)
    parts = gl.allocate_shared_memory(out.dtype, [2, HALF, CLASSES // 2], out.layout)
    full, empty = barriers(SLOTS, 2)
    fence_async_shared()
    slots = (upper, lower, columns, full, empty)
    if SUMMED:
        tiles *= gl.load(todo)
    walk = (tiles, group, class_tiles, steps)
    facts = (target, reference, dead)
    sums = (peaks, totals)
    counts = (rows, vocabulary, first_class, first_tile)
    bend = (logit_scale, softcap)
    gl.warp_specialize(
        [
            (_consume, (slots, parts, out, facts, sums, counts, walk, bend, 0, SLOTS, SUMMED, SCALED, CAPPED)),
            (_consume, (slots, parts, out, facts, sums, counts, walk, bend, 1, SLOTS, SUMMED, SCALED, CAPPED)),
            (produce, (slots, hidden, classifier, walk, SLOTS)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [REGISTERS, 24],  # and their registers
    )
