"""The gradient of logits on Hopper, in Gluon: a matrix product that never stores the logits.

Tiles are computed as in `product_kernel`. When a tile is complete, its float32 logits are in the registers of a
consumer. It computes their gradients from the row's coefficients, which `finish_kernel` has computed, and stores
only the gradients. For a class c other than the target,

    g_c = e^(x_c - m) (factor + tilt log2(e) (x_c - m)) dx_c/dz_c.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from xent.backends.triton.hopper.product_kernel import (
    FLOOR,
    LOG2E,
    accumulator,
    bent,
    exp2,
    multiply,
    place,
    produce,
    slots_of,
)

__all__ = ["gradient_product_kernel"]


@gluon.constexpr_function
def _stored(rows, classes):
    """Return the layout for storing a tile: each thread has 8 classes (16 bytes) of a row.

    Converting from `accumulator` exchanges data between four neighbouring threads of a warp only.
    """
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, 2**bit] for bit in range(5, classes.bit_length() - 1)]
    warps = [[2**bit, 0] for bit in range(4, rows.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], warps, [], [rows, classes])


@gluon.jit
def _consume(
    slots, rest, walk, bend,
    HALF_INDEX: gl.constexpr, SLOTS: gl.constexpr, SCALED: gl.constexpr, CAPPED: gl.constexpr, TILTED: gl.constexpr,
):  # fmt: skip
    """Code of a consumer, four warps: compute one half of the rows of each tile."""
    upper, lower, columns, full, empty = slots
    halves = upper
    if HALF_INDEX == 1:
        halves = lower
    target, coefficients, grad, rows, vocabulary, pitch8 = rest
    units = walk[0]
    HALF: gl.constexpr = upper.shape[1]
    CLASSES: gl.constexpr = columns.shape[1]
    LAYOUT: gl.constexpr = accumulator(CLASSES, gl.num_warps())
    PER_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    STORED: gl.constexpr = _stored(HALF, CLASSES)
    stored_rows = gl.arange(0, HALF, layout=gl.SliceLayout(1, STORED))
    stored_classes = gl.arange(0, CLASSES, layout=gl.SliceLayout(0, STORED))
    inside = gl.arange(0, HALF, layout=PER_ROW)
    classes = gl.arange(0, CLASSES, layout=gl.SliceLayout(0, LAYOUT))
    slot = 0
    phase = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        band, begin, end = place(unit, walk)
        row = band * (2 * HALF) + HALF_INDEX * HALF + inside
        here = row < rows
        y = gl.load(target + row, mask=here, other=-1)
        m = gl.load(coefficients + row, mask=here, other=0.0)
        factor = gl.load(coefficients + rows + row, mask=here, other=0.0)
        of_target = gl.load(coefficients + 2 * rows + row, mask=here, other=0.0)
        tilt = factor
        if TILTED:
            tilt = gl.load(coefficients + 3 * rows + row, mask=here, other=0.0)
        dead = gl.max((y == -2).to(gl.int32), 0)
        stored_row = band * (2 * HALF) + HALF_INDEX * HALF + stored_rows
        line = grad + stored_row.to(gl.int64) * (pitch8 * 8)
        for part in range(begin, end):
            first = part * CLASSES
            special = gl.max(((y >= first) & (y < first + CLASSES)).to(gl.int32), 0) | dead
            z, slot, phase = multiply(halves, columns, full, empty, slot, phase, walk[5], SLOTS)
            x, steep = bent(z, bend, SCALED, CAPPED)
            e2 = (x - m[:, None]) * LOG2E
            if TILTED:
                g = exp2(e2) * (factor[:, None] + tilt[:, None] * gl.maximum(e2, FLOOR))
            else:
                g = exp2(e2) * factor[:, None]
            if SCALED or CAPPED:
                g = g * steep
            c = first + classes
            if (special != 0) | (first + CLASSES > vocabulary):
                g = gl.where(c[None, :] == y[:, None], of_target[:, None], g)
                g = gl.where((c < vocabulary)[None, :] & (y != -2)[:, None], g, 0.0)
            made = gl.convert_layout(g.to(grad.dtype.element_ty), STORED)
            at = first + stored_classes
            gl.store(line[:, None] + at[None, :], made, mask=(stored_row < rows)[:, None] & (at < pitch8 * 8)[None, :])


@gluon.jit(
    do_not_specialize=[
        "rows", "vocabulary", "pitch8", "units", "group", "chunks", "tiles_per_chunk", "class_tiles", "steps",
    ],
    do_not_specialize_on_alignment=["target", "coefficients"],
)  # fmt: skip
def gradient_product_kernel(
    hidden,  # see `product_kernel` for arguments that are not described here
    classifier,
    target,  # (R,) int32; -2: the gradient of the row is 0
    coefficients,  # (4 or more, R) float32: m, factor, the target's gradient, tilt
    grad,  # (R, 8 * pitch8), 16-bit, aligned to 16 bytes; 0 beyond the vocabulary
    rows,
    vocabulary,
    pitch8,
    units,
    group,
    chunks,
    tiles_per_chunk,
    class_tiles,
    steps,
    logit_scale,
    softcap,
    SLOTS: gl.constexpr,
    SCALED: gl.constexpr,
    CAPPED: gl.constexpr,
    TILTED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Write the gradients of all rows; see the module's docstring."""
    slots = slots_of(hidden, classifier, SLOTS)
    walk = (units, group, chunks, tiles_per_chunk, class_tiles, steps)
    bend = (logit_scale, softcap)
    rest = (target, coefficients, grad, rows, vocabulary, pitch8)
    gl.warp_specialize(
        [
            (_consume, (slots, rest, walk, bend, 0, SLOTS, SCALED, CAPPED, TILTED)),
            (_consume, (slots, rest, walk, bend, 1, SLOTS, SCALED, CAPPED, TILTED)),
            (produce, (slots, hidden, classifier, walk, SLOTS)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
