"""Loss, statistics and gradient of whole rows in one launch, with one program per row or part: fold, finish, gradient.

The first pass over a row computes its sums (`fold`). The second pass writes the gradient (`_write_gradient`). It starts
at the end of the row, which is still in the caches. The target's own gradient is written after all others.

Rows that do not begin at multiples of 16 bytes (skewed) are read from the last multiple before them, so that loads and
stores keep their width.

Several programs share a long row (parts), so that fewer rows are in flight and the second pass finds them in the L2
cache. Each computes the sums and the gradient of its part of the classes, and all store the same results. Rows with
label smoothing are not shared; `xent.backends.triton.geometry.sizes` has the other conditions. Each program publishes
its sums as 64-bit words, a tag and a float32 in one word, and reads the words of the other programs until all have
tags. So no order of memory accesses is assumed between words. The sums of a part are relative to its own reference,
those of the row to the largest reference.

A program that waits stays on its multiprocessor, so programs must not wait for others that may start after they end.
A program's number is therefore not that of the launch, but counts the programs that started before it (`counter`).
Programs of a row have adjacent numbers. So only the row that was started last can have programs that have not started,
and at most PARTS - 1 programs wait for them. A launch finishes if the GPU can hold PARTS of its programs at a time,
also while other launches run. Triton's interpreter runs programs one after the other, so it takes two launches, in
which all words have tags from the beginning: one without a gradient, after which all words have their numbers, and one
that computes the results again.

`gradient_kernel` takes the second pass alone, for rows whose sums are finished already.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.algebra import (
    FLOOR,
    LN2,
    LOG2E,
    NOWHERE,
    activate,
    activation_of,
    divisors_of,
    exponent,
    finish,
    finite,
    gradient_factor,
    has_statistics,
    numbers_of,
    optional,
    position,
    quick_exponent,
    record_nothing,
    rounding,
    row_at,
    row_facts,
    slope,
    times,
)
from xent.backends.triton.kernels.fold import fetch, fill, first_loads, line_of, row_sums, shares_of
from xent.backends.triton.kernels.sums import EXCLUDED, put
from xent.backends.triton.launches import kernel

__all__ = ["MOST_COUNTED", "TAG", "WORDS", "gradient_kernel", "rows_kernel"]


@triton.jit
def _block(z, classes, vocabulary, terms, weights, activation, way: tl.constexpr, FOLDED: tl.constexpr):
    """Return the gradient of a block of raw logits; at the target it is wrong and must be overwritten.

    `terms` are m, factor, log_factor, delta and gamma, see `finish` and `_scaled`. With FOLDED, the factor is in the
    exponent: the first is log2(e) m - log2(factor), in units of log2.
    """
    reference, factor, log_factor, delta, gamma = terms
    if FOLDED:
        g = tl.math.exp2(quick_exponent(z, activation, reference, way))
    else:
        e2 = exponent(activate(z, activation, way), reference, way.exact)
        g = tl.math.exp2(e2) * (tl.fma(tl.maximum(e2, FLOOR), log_factor, factor) if way.of_entropy else factor)
    if way.smoothed:
        if weights[0] is not None or weights[1] is not None:
            q, share = shares_of(weights, classes, (classes >= 0) & (classes < vocabulary))
            g = tl.fma(share, -delta, g)
            if weights[1] is not None:
                g -= gamma * q
        else:
            g -= delta
    if way.capped:
        g *= slope(z, activation, way)
    return g


@triton.jit
def _scaled(terms, activation, way: tl.constexpr):
    """Return terms of the gradient that contain the logit scale, unless `slope` has it, with a softcap."""
    m, factor, log_factor, delta, gamma = terms
    scale = 1.0 if way.capped else activation[0]
    return m, factor * scale, log_factor * scale, delta * scale, gamma * scale


@triton.jit
def _store(row, first, g, skew, vocabulary, way: tl.constexpr):
    """Store a block of a row in whole vectors. The partial vectors of a ragged row are left out, see `_edges`."""
    lanes = tl.arange(0, way.block)
    inside = lanes < (vocabulary + skew) // way.vector * way.vector - first
    if way.ragged:
        inside = inside & (lanes >= (skew + way.vector - 1) // way.vector * way.vector - first)
    tl.store(row + first + lanes, g.to(row.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit
def _edges(start, stop, skew, vocabulary, VECTOR: tl.constexpr):
    """Return 2 VECTOR places of a ragged row, and which of them are in its partial vectors and in [start, stop).

    A row has at most two partial vectors, its first and its last.
    """
    k = tl.arange(0, 2 * VECTOR)
    begin = (skew + VECTOR - 1) // VECTOR * VECTOR
    end = (vocabulary + skew) // VECTOR * VECTOR
    places = tl.where(k < VECTOR, k, end + k - VECTOR)
    inside = (places >= skew) & (places < vocabulary + skew) & ((places < begin) | (places >= end))
    return places, inside & (places >= start) & (places < stop)


@triton.jit
def _write_gradient(line, place, start, terms, weights, activation, way: tl.constexpr, FOLDED: tl.constexpr):
    """Write the gradient of a row's blocks from `start` to the last one, in which the target's is still wrong.

    It goes backwards from the end of the row, which is still in the caches if the row was just read. Each block is
    loaded while the previous one is computed. Partial vectors of a ragged row are written at the end.
    """
    BLOCK: tl.constexpr = way.block
    source, off, last, whole, vocabulary = line
    ahead = fetch(source, last, whole, way, "evict_first")
    for back in range(0, last - start + 1, BLOCK):
        first = last - back
        z = ahead
        ahead = fetch(source, tl.maximum(first - BLOCK, start), first, way, "evict_first")
        g = _block(z, first + tl.arange(0, BLOCK) - off, vocabulary, terms, weights, activation, way, FOLDED)
        _store(place, first, g, off, vocabulary, way)
    if way.ragged:
        places, inside = _edges(start, last + BLOCK, off, vocabulary, way.vector)
        z = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
        g = _block(z, places - off, vocabulary, terms, weights, activation, way, FOLDED)
        tl.store(place + places, g.to(place.dtype.element_ty), mask=inside)


@kernel
def gradient_kernel(
    logits,  # rows at position(row, inner, outer, stride)
    logits_inner: "i64",
    logits_outer: "i64",
    logits_row: "i64",
    skew: "i64",  # offset of `logits` from a multiple of 16 bytes, in elements
    grad,  # may be the logits; aligned like them
    grad_inner: "i64",
    grad_outer: "i64",
    grad_row: "i64",
    coefficients,  # (6, R) float32 of `finish_kernel`, rows `sums_stride` apart
    sums_stride: "i64",
    rows,  # the class weights are those of the classes from `first_here` on
    numbers,
    start: "i64",  # index of the first row in `rows.order`, or in the call
    first_here: "i32",  # the first class of the logits, relative to the rank's
    width: "i32",
    way: tl.constexpr,  # see `Way`
    BLOCKS: tl.constexpr,  # number of blocks of a row that a program writes
):
    """Write the gradient of one part of one row."""
    SIZE: tl.constexpr = BLOCKS * way.block
    parts = tl.cdiv(width + (way.vector - 1 if way.skewed else 0), SIZE)
    local_row = (tl.program_id(0) // parts).to(tl.int64)
    first = tl.program_id(0) % parts * SIZE
    of_row = coefficients + local_row
    y = tl.load(of_row + 5 * sums_stride).to(tl.int32, bitcast=True)
    source, off, last, whole, _width = line_of(
        logits, local_row, logits_inner, logits_outer, logits_row, skew, 0, width, way
    )
    place = line_of(grad, local_row, grad_inner, grad_outer, grad_row, skew, 0, width, way)[0]
    last = tl.minimum(first + SIZE - way.block, last)
    if ((y == EXCLUDED) | (first > last)) != 0:  # an aligned row may have one part less than a skewed row
        fill(place + off, 0.0, tl.maximum(first - off, 0), tl.minimum(last + way.block - off, width), way)
    else:
        activation = activation_of(row_at(start + local_row, None, rows), None, rows, numbers)
        line = source, off, last, whole, width
        terms = (
            tl.load(of_row),
            tl.load(of_row + sums_stride),
            tl.load(of_row + 3 * sums_stride),
            tl.load(of_row + 4 * sums_stride),
            0.0,
        )
        terms = _scaled(terms, activation, way)
        weights = rows.class_weight if way.smoothed else None, None
        _write_gradient(line, place, first, terms, weights, activation, way, False)
        y -= first_here
        if (y >= 0) & (y < width) & (y + off >= first) & (y + off < last + way.block):
            tl.debug_barrier()
            tl.store(place + (off + y), tl.load(of_row + 2 * sums_stride).to(grad.dtype.element_ty))


WORDS = 8
"""The words of a program: m, others, mixed, squares, level, largest key, target's raw logit, predicted class."""

TAG = 1 << 32
"""The tag of a word that was published, above the 32 bits of its number."""

MOST_COUNTED = 1024
"""The largest number of rows that each program counts for the divisor of a mean."""

_MOST_COUNTED = tl.constexpr(MOST_COUNTED)
_WORDS = tl.constexpr(WORDS)
_TAG = tl.constexpr(TAG)


@triton.jit
def _of_parts(table, index: tl.constexpr):
    """Return one value of each part, (PARTS,), from those of all (PARTS, WORDS)."""
    return tl.sum(tl.where(tl.arange(0, _WORDS)[None, :] == index, table, 0), 1)


@triton.jit
def _exchanged(
    words, part, has_target, z_y, x_y, m, others, mixed, squares, level, top, top_class,
    way: tl.constexpr,
):  # fmt: skip
    """Return the target's raw logit, the row's m, and the sums of the row, from those of a part.

    `words` (parts, WORDS) belongs to the row. The part's sums do not contain the target, but m may be its x. Only the
    part that has the target knows `z_y`: the gradient may overwrite it before other programs could load it.
    """
    PARTS: tl.constexpr = way.parts
    possible = (others != 0) | (has_target & (x_y != -float("inf")))
    m = tl.where(possible, m, -float("inf"))
    k = tl.arange(0, _WORDS)
    own = tl.where(k == 0, m, tl.where(k == 1, others, tl.where(k == 2, mixed, tl.where(k == 3, squares, level))))
    own = tl.where(k == 5, top, tl.where(k == 6, tl.where(has_target, z_y, 0.0), own))
    bits = own.to(tl.int32, bitcast=True)
    bits = tl.where(k == 7, top_class, bits)
    word = _TAG + (bits.to(tl.int64) & 0xFFFFFFFF)
    tl.atomic_xchg(words + part * _WORDS + k, word, sem="relaxed")
    places = words + tl.arange(0, PARTS * _WORDS)
    while tl.min((tl.load(places, volatile=True) >> 32).to(tl.int32), 0) == 0:
        pass
    # Again, because each warp reads for itself: some may have left the loop with words from before they were written.
    all_bits = tl.reshape(tl.load(places, volatile=True).to(tl.int32), [PARTS, _WORDS])
    table = all_bits.to(tl.float32, bitcast=True)
    each_m = _of_parts(table, 0)
    m = finite(tl.max(each_m, 0))
    # Exponents of a part are relative to its m. If its m was multiplied by log2(e) first, they contain that rounding.
    change = (each_m - m) * LOG2E + rounding(m, way.exact) - rounding(each_m, way.exact)
    factor = tl.math.exp2(change)
    each = _of_parts(table, 1)
    others = tl.sum(times(factor, each), 0)
    mixed = tl.sum(times(factor, _of_parts(table, 2) + times(each, change)), 0)
    squares = tl.sum(times(factor * factor, _of_parts(table, 3)), 0)
    level = tl.sum(_of_parts(table, 4), 0)
    each_top = _of_parts(table, 5)
    top = tl.max(each_top, 0)
    top_class = tl.min(tl.where(each_top == top, _of_parts(all_bits, 7), NOWHERE), 0)
    return tl.sum(_of_parts(table, 6), 0), m, others, mixed, squares, level, top_class


# Up to this reference, the gradient's factor can be moved into the exponent for 16-bit logits.
NEAR = tl.constexpr(512.0)
LARGEST_FACTOR = tl.constexpr(1e18)
UNLIMITED = tl.constexpr(2**62)


@triton.jit
def _save(
    saved, count, row, m, rest, mixed, z_y, w_y, total_weight, columns: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Write the sums of a row that its gradient needs, as if exponents had subtracted m before they multiplied."""
    change = -rounding(m, EXACT)
    factor = tl.math.exp2(change)
    mixed = factor * (mixed + times(rest, change)) * LN2
    sums = factor * rest, 0.0, total_weight - w_y, mixed, 0.0, 0.0, 0.0, m, z_y, w_y, 0.0, 0.0, 0.0
    put(saved + row, count, None, sums, columns)


@kernel
def rows_kernel(
    logits,  # rows at position(row, inner, outer_stride, row_stride)
    logits_inner: "i64",
    logits_outer: "i64",
    logits_row: "i64",
    skew: "i64",  # offset of `logits` from a multiple of 16 bytes, in elements
    grad,  # gradient, or None; may be the logits; aligned like them
    grad_inner: "i64",
    grad_outer: "i64",
    grad_row: "i64",
    target_logits,  # (R,) float32 or None: replace the targets' raw logits
    saved,  # (K, N) float32 or None
    words,  # (rows of the launch, `Way.parts`, WORDS) int64 and a counter, all 0; or None for one program per row
    rows,
    upstreams,
    results,
    numbers,
    start: "i64",  # index of the first row in the order
    count: "i64",  # N
    counts: "i32",  # whether each program counts the rows that divide a mean: `rows` has no divisor
    ignore_index: "i64",
    vocabulary: "i32",
    part_size: "i32",  # classes of a program: all, or a multiple of VECTOR; the last program has the rest
    probabilities,  # rows at position(row, inner, outer, row stride), classes `given_class` apart; None for classes
    given_inner: "i64",
    given_outer: "i64",
    given_row: "i64",
    given_class: "i64",
    likeliest,  # the most probable class of each row of `probabilities`, or None
    columns: tl.constexpr,  # of `saved`, see `Columns`
    way: tl.constexpr,  # see `Way`
):
    """See the module's docstring. With probabilities, `rows.target` has the index of each row's, or is None."""
    tl.static_assert(way.parts == 1 or not way.smoothed)  # the sum `below` is not exchanged
    if way.parts > 1:
        counter = words + tl.num_programs(0).to(tl.int64) * _WORDS
        program = tl.atomic_add(counter, 1, sem="relaxed").to(tl.int32)
    else:
        program = tl.program_id(0)
    local_row = (program // way.parts).to(tl.int64)
    row = row_at(start + local_row, None, rows)
    GIVEN: tl.constexpr = probabilities is not None
    y_long, a, ignored, invalid = row_facts(row, None, rows, ignore_index, UNLIMITED if GIVEN else vocabulary)
    y = y_long.to(tl.int32)
    if GIVEN:
        y = y * 0 - 1
    # The classes of this program, and the target among them.
    part = program % way.parts
    cut = part * part_size
    size = tl.minimum(vocabulary - cut, part_size)
    y_here = y - cut
    has_target = (y_here >= 0) & (y_here < size)
    known = tl.where(ignored, 0, size)
    line = line_of(logits, local_row, logits_inner, logits_outer, logits_row, skew, cut, known, way)
    source, off, _last, _whole, _size = line
    # The first loads need only the target. They start before the other facts of the row are known.
    loads = first_loads(line, y_here, way)
    if target_logits is None:
        z_y = tl.load(source + (off + y_here), mask=has_target & ~ignored, other=0.0).to(tl.float32)
    else:
        z_y = tl.load(target_logits + local_row)
    options = numbers_of(rows, vocabulary, numbers)
    weights = rows.class_weight if way.smoothed else None, None
    if GIVEN:
        shared = row if rows.target is None else y_long
        own_q = probabilities + position(shared, given_inner, given_outer, given_row, True)
        weights = rows.class_weight, own_q, given_class, options[0], options[1]  # type: ignore[assignment]
        options = 0.0, 1.0, options[2]
        w_y = 0.0
        true = 0 if likeliest is None else tl.load(likeliest + shared).to(tl.int32)
    else:
        w_y = optional(rows.class_weight, y_long, None, 1.0)
        true = y
    activation = activation_of(row, None, rows, numbers)
    if not way.scaled:
        activation = tl.full((), 1.0, tl.float32), activation[1]
    divisor, of_gradient = divisors_of(rows)
    if not GIVEN:
        if counts != 0:
            each = tl.arange(0, _MOST_COUNTED)
            _y, weight, _ignored, wrong = row_facts(each, each < count, rows, ignore_index, vocabulary)
            divisor = tl.sum(tl.where(wrong, 0.0, weight), 0)
            of_gradient = divisor
    excluded, r = gradient_factor(row, None, a, invalid, of_gradient, upstreams)
    if grad is not None:
        place = line_of(grad, local_row, grad_inner, grad_outer, grad_row, skew, cut, size, way)[0]

    if tl.where(numbers.all_rows != 0, ignored, excluded):
        record_nothing(row, None, results)
        if grad is not None:
            fill(place + off, 0.0, 0, size, way)
    else:
        x_y = activate(z_y, activation, way, True)
        x_here = tl.where(has_target, x_y, -float("inf"))
        m, sums, top, top_class = row_sums(line, loads, y_here, x_here, weights, activation, way)
        rest, below, mixed, squares, level, surprise, mass, all_q = sums
        top_class += cut
        if way.parts > 1:
            z_y, m, rest, mixed, squares, level, top_class = _exchanged(
                words + local_row * way.parts * _WORDS, part, has_target, z_y, x_y, m, rest, mixed, squares, level, top,
                top_class, way,
            )  # fmt: skip
            x_y = activate(z_y, activation, way, True)
        e2_y = tl.full((), -float("inf"), tl.float32) if GIVEN else exponent(x_y, m, way.exact)

        total_weight = vocabulary * 1.0
        if GIVEN:
            total_weight = mass
        elif way.smoothed and rows.class_weight is not None:
            total_weight = tl.load(rows.total_weight)
        factor, log_factor, delta, g_y, gamma = finish(
            divisor, row, None, (true, a, ignored, invalid), excluded, r, w_y, z_y, m,
            (rest, below * LN2, total_weight, mixed, squares), e2_y, level / vocabulary, top_class,
            (surprise * LN2, all_q) if GIVEN else None, results, upstreams, options, activation, way,
        )  # fmt: skip
        if saved is not None:
            _save(saved, count, row, m, rest, mixed, z_y, w_y, total_weight, columns, way.exact)
        if grad is not None:
            if tl.where(has_statistics(upstreams), ignored, excluded):
                fill(place + off, 0.0, 0, size, way)
            else:
                terms = _scaled((m, factor, log_factor, delta, gamma), activation, way)
                factor, m2 = terms[1], m * LOG2E
                foldable = (factor > 0) & (factor < LARGEST_FACTOR) & (tl.abs(m2) < NEAR)
                if not (way.exact or way.of_entropy) and foldable:
                    reference = m2 - tl.log2(tl.where(foldable, factor, 1.0))
                    folded = reference, factor, terms[2], terms[3], terms[4]
                    _write_gradient(line, place, 0, folded, weights, activation, way, True)
                else:
                    _write_gradient(line, place, 0, terms, weights, activation, way, False)
                if not GIVEN:
                    tl.debug_barrier()
                    tl.store(place + (off + y_here), g_y.to(grad.dtype.element_ty), mask=has_target)
