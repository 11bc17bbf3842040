"""The steps around the exponentials kernel, in plain Triton: what a row is given before, and what is made of its sums.

`xent.backends.triton.exponentials` has the formulas.
"""

import triton
import triton.language as tl

from xent.backends.triton.maths import activate, exp, expm1

__all__ = [
    "add_targets_kernel",
    "factors_kernel",
    "finish_input_kernel",
    "link_targets_kernel",
    "scale_rows_kernel",
    "settle_kernel",
    "start_kernel",
]

# How far the reference is above the target's x, and how far below the row's largest x it may be for a factor of the
# gradient that is not small. A small one might vanish in a row's scale.
MARGIN = tl.constexpr(20.0)
LIMIT = tl.constexpr(40.0)
# Sums are relative to no less below the reference, where next to nothing is left.
FLOOR = tl.constexpr(60.0)
LOWEST = tl.constexpr(-1e30)
SMALL = tl.constexpr(1e-12)
# Of its factor, and at least: the scale of a row whose other gradients are 0, for that of the target alone.
TINY = tl.constexpr(1e-30)
TINIEST = tl.constexpr(1e-35)
RARE = tl.constexpr(4)  # rows that have a class for target, at most
NO_ROW = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["target_logits", "references", "todo"])
def start_kernel(
    target_logits,  # (R,)
    references,  # (2, R), of which the second is not written yet
    todo,  # (2,) int32: whether there is a first and a second attempt
    rows,
    softcap,
    logit_scale,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Give a block of rows its references."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    x_y, _slope = activate(tl.load(target_logits + row, mask=inside, other=0.0), logit_scale, softcap, SCALED, CAPPED)
    tl.store(references + row, tl.maximum(x_y, LOWEST) + MARGIN, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(todo, 1)
        tl.store(todo + 1, 0)


@triton.jit
def _reduce(tile_peaks, tile_totals, row, inside, rows, tiles, BLOCK: tl.constexpr):
    """Return peak and total of a block of rows over all tiles of classes."""
    TILES: tl.constexpr = 4096 // BLOCK
    peak = tl.full([TILES, BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([TILES, BLOCK], tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        place = tile[:, None] * rows + row[None, :]
        there = (tile < tiles)[:, None] & inside[None, :]
        peak = tl.maximum(peak, tl.load(tile_peaks + place, mask=there, other=-float("inf")))
        total += tl.load(tile_totals + place, mask=there, other=0.0)
    return tl.max(peak, 0), tl.sum(total, 0)


@triton.jit(
    do_not_specialize=["rows", "tiles"],
    do_not_specialize_on_alignment=[
        "tile_peaks",
        "tile_totals",
        "references",
        "todo",
        "peaks",
        "totals",
        "idle",
        "factors",
    ],
)
def settle_kernel(
    tile_peaks,  # (T, R)
    tile_totals,
    references,
    todo,
    peaks,  # (R,) what tiles of logits would have found, for `finish_kernel`
    totals,
    idle,  # (R,) bool: rows that no second attempt is made for
    factors,  # (R,) r
    rows,
    tiles,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """After an attempt: add up a block of rows. Those too far above their reference get another, for a second one."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    if LAST:
        if tl.load(todo + 1) == 0:
            return
        references += rows
    peak, total = _reduce(tile_peaks, tile_totals, row, inside, rows, tiles, BLOCK)
    reference = tl.load(references + row, mask=inside, other=float("inf"))
    if not LAST:
        wanted = tl.load(idle + row, mask=inside, other=1) == 0
        r = tl.load(factors + row, mask=inside, other=0.0)
        limit = tl.where((r != 0) & (tl.abs(r) < SMALL), 0.0, LIMIT)
        far = wanted & (peak - reference > limit) & (peak < float("inf"))
        tl.store(references + rows + row, tl.where(far, peak, reference), mask=inside)
        if tl.max(far.to(tl.int32), 0) != 0:
            tl.store(todo + 1, 1)
    largest = tl.maximum(peak, reference - FLOOR)
    tl.store(peaks + row, largest, mask=inside)
    tl.store(totals + row, total * exp(reference - largest), mask=inside)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["target", "dead"])
def link_targets_kernel(
    target,  # (N,)
    dead,  # (N,) bool: rows that are left out
    newest,  # (V,) int32: a row that has the class for target, -1 for none
    older,  # (N,) int32: from row to row the others, in no certain order; -1 behind the last
    count,
    BLOCK: tl.constexpr,
):
    """Link the rows that have one class for target."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    alive = tl.load(dead + row, mask=row < count, other=1) == 0
    y = tl.load(target + row, mask=alive, other=0)
    tl.store(older + row, tl.atomic_xchg(newest + y, row, mask=alive, sem="relaxed"), mask=alive)


@triton.jit(
    do_not_specialize=["rows", "first", "classes"],
    do_not_specialize_on_alignment=[
        "references",
        "todo",
        "peaks",
        "log_sums",
        "target_logits",
        "factors",
        "dead",
        "target",
        "scale",
        "at_target",
    ],
)
def factors_kernel(
    exponentials,  # (R, C), rows `pitch` apart, of classes first, first + 1, ...
    pitch,
    references,  # (R,), or with `todo` (2, R)
    todo,
    peaks,  # (R,), the norm, like all of the next
    log_sums,
    target_logits,
    factors,  # r
    dead,
    target,
    newest,  # (V,) int32 and
    older,  # (N,) int32, see `link_targets_kernel`
    scale,  # (R,) s
    at_target,  # (R,) g_y
    rows,
    first,
    classes,  # C
    z_loss,
    softcap,
    logit_scale,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write what the gradients of a block of rows still lack, and the target to its place, if it is there and not rare.

    At such a target nothing is lacking.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    if todo is not None:
        references += tl.load(todo + 1) * rows
    reference = tl.load(references + row, mask=inside, other=0.0)
    peak = tl.load(peaks + row, mask=inside, other=0.0)
    log_sum = tl.load(log_sums + row, mask=inside, other=0.0)
    z_y = tl.load(target_logits + row, mask=inside, other=0.0)
    x_y, slope_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED)
    r = tl.load(factors + row, mask=inside, other=0.0)
    alive = tl.load(dead + row, mask=inside, other=1) == 0
    y = tl.load(target + row, mask=inside, other=0)
    other = tl.load(newest + y, mask=inside, other=-1)
    for _ in tl.static_range(RARE):
        other = tl.load(older + other, mask=other >= 0, other=-1)
    often = other >= 0
    pull = tl.zeros([BLOCK], tl.float32)
    if Z_LOSS:
        pull = 2 * z_loss * (peak + log_sum)
    log_p_y = (x_y - peak) - log_sum
    s = r * (1 + pull) * exp((reference - peak) - log_sum)
    s = tl.where(alive, s * logit_scale if SCALED else s, 0.0)
    g_y = tl.where(alive, r * (expm1(log_p_y) + pull * exp(log_p_y)) * slope_y, 0.0)
    s = tl.where(often & (s == 0) & (g_y != 0), tl.maximum(tl.abs(r) * TINY, TINIEST), s)
    e_y = tl.where(s == 0, 0.0, tl.div_rn(g_y, tl.where(s == 0, 1.0, s)))
    placed = inside & often & (y >= first) & (y < first + classes)
    tl.store(exponentials + row.to(tl.int64) * pitch + (y - first), e_y.to(exponentials.dtype.element_ty), mask=placed)
    tl.store(scale + row, s, mask=inside)
    tl.store(at_target + row, tl.where(often, 0.0, g_y), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["scale"])
def scale_rows_kernel(hidden, hidden_row, hidden_column, scale, out, out_row, out_column, width, BLOCK: tl.constexpr):
    """Write s hidden of one row, 0 where s is 0; `out` may be `hidden`."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.load(scale + row)
    for first in range(0, width, BLOCK):
        column = (first + tl.arange(0, BLOCK)).to(tl.int64)
        inside = column < width
        h = tl.load(hidden + row * hidden_row + column * hidden_column, mask=inside, other=0.0)
        scaled = tl.where(s == 0, 0.0, s * h.to(tl.float32))
        tl.store(out + row * out_row + column * out_column, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["scale", "at_target", "target", "rows"])
def finish_input_kernel(
    product,  # (R, C) float32, rows `product_row` apart: E @ C columns of the classifier
    product_row,
    scale,  # (R,), like those that follow
    at_target,
    target,
    classifier,  # (V, C), rows `classifier_row` apart
    classifier_row,
    grad,  # (N, C), rows `grad_row` apart
    grad_row,
    rows,  # (R,) int64, which rows of it these are; None for the first
    width,
    BLOCK: tl.constexpr,
):
    """Write the gradient of one row of hidden states."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.load(scale + row)
    g_y = tl.load(at_target + row)
    product += row * product_row
    classifier += tl.load(target + row) * classifier_row
    place = row
    if rows is not None:
        place = tl.load(rows + row)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        of_others = tl.load(product + column, mask=inside, other=0.0)
        of_target = tl.load(classifier + column, mask=inside, other=0.0).to(tl.float32)
        found = tl.where(s == 0, 0.0, s * of_others) + tl.where(g_y == 0, 0.0, g_y * of_target)
        tl.store(grad + place * grad_row + column, found.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def _next(row, one, two, three, four):
    """Return the smallest of four that is larger than `row`, `NO_ROW` if none is."""
    first = tl.minimum(tl.where(one > row, one, NO_ROW), tl.where(two > row, two, NO_ROW))
    return tl.minimum(first, tl.minimum(tl.where(three > row, three, NO_ROW), tl.where(four > row, four, NO_ROW)))


@triton.jit
def _as_computed(hidden):
    """Return hidden states as the products had them."""
    return hidden.to(tl.bfloat16).to(tl.float32)


@triton.jit
def add_targets_kernel(
    total,  # (V, D), rows `total_row` apart
    total_row,
    hidden,  # (N, D), then its strides
    hidden_row,
    hidden_column,
    target,  # (N,)
    newest,  # (V,) int32 and
    older,  # (N,) int32, see `link_targets_kernel`
    at_target,  # (N,)
    width,
    BLOCK: tl.constexpr,
):
    """Add the hidden states of all rows that have one rare class for target, times g_y, in the order of rows."""
    one = tl.program_id(0)
    y = tl.load(target + one)
    if tl.load(newest + y) != one:
        return
    two = tl.load(older + one)
    three = tl.load(older + two, mask=two >= 0, other=-1)
    four = tl.load(older + three, mask=three >= 0, other=-1)
    if tl.load(older + four, mask=four >= 0, other=-1) >= 0:
        return  # no rare one
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    hidden += column.to(tl.int64) * hidden_column
    total += y * total_row + column
    found = tl.load(total, mask=inside, other=0.0).to(tl.float32)
    row = -1
    for _ in tl.static_range(RARE):
        row = _next(row, one, two, three, four)
        is_row = row != NO_ROW
        g_y = tl.load(at_target + row, mask=is_row, other=0.0)
        h = _as_computed(tl.load(hidden + row.to(tl.int64) * hidden_row, mask=inside & is_row, other=0.0))
        found += tl.where(g_y == 0, 0.0, g_y * h)
    tl.store(total, found.to(total.dtype.element_ty), mask=inside)
