"""The row kernel for Hopper, in Gluon: loss and gradient with one read and one write of device memory.

Why a ring. A row must be read whole, for its log-sum-exp, before the first gradient can be written, and has to be
looked at again for that. Here the second look is at shared memory: a producer warp copies rows block by block into a
ring of slots (the bulk copy engine, one mbarrier a slot), the other warps fold each block into running maxima and
sums as it arrives, reduce once per row, and then go over the same slots again to write the gradient. A slot is free
as soon as its gradient is written, and the producer at once loads a block of the next row into it.

A row too large for one ring is split over GROUP programs. Each writes its part's (maximum, sum) as one 64-bit word
and waits for the others' words; the ring keeps loading meanwhile. All members fold the words in the same order, so
results do not depend on who came first. Programs take their number from a ticket counter, not from their index: all
members of a group but the last have then been started before anyone waits, and whoever is missing starts as soon as
complete groups have finished.

Numbers. A thread keeps its largest x so far and the sum of e^(x - largest). The target's x is kept out of the blocks'
sums and comes from `target_logits` if they are there, which rounded logits need; then 1 - p of a target that is nearly
sure is the sum of the others' p, and cancels nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from xent.backends.triton.ring_parts import activate, barriers, exchange, exp, fade, finite, fold, read

__all__ = ["ring_kernel"]


@gluon.jit
def _ahead(slot, phase, steps, SLOTS: gl.constexpr):
    """Return the slot so many steps on, at most once around, and the phase of its barrier."""
    slot += steps
    wrapped = slot >= SLOTS
    return gl.where(wrapped, slot - SLOTS, slot), phase ^ wrapped.to(gl.int32)


@gluon.jit
def _produce(slots, descriptor, rows, walk, part, BLOCK: gl.constexpr, SLOTS: gl.constexpr):
    """One warp: every free slot starts to load the next block at once."""
    ring, full, empty = slots
    first, step = walk
    begin, blocks = part
    BYTES: gl.constexpr = BLOCK * ring.dtype.primitive_bitwidth // 8
    slot = 0
    phase = 1
    for row in range(first, rows, step):
        for b in range(blocks):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), BYTES)
            where = [row, begin + b * BLOCK]
            tma.async_copy_global_to_shared(descriptor, where, full.index(slot), ring.index(slot))
            slot, phase = _ahead(slot, phase, 1, SLOTS)


@gluon.jit
def _first_look(
    slots,
    slot,
    phase,
    part,
    inside,
    vocabulary,
    y,
    mine,
    bend,
    SCALED: gl.constexpr,
    CAPPED: gl.constexpr,
    SMOOTHED: gl.constexpr,
    SLOTS: gl.constexpr,
    FLAT: gl.constexpr,
    CUBE: gl.constexpr,
):
    """Return each thread's largest x, what its sum of exponentials is relative to, that sum, and its sum of x.

    Blocks are taken as they arrive, but for two that come last: the one with the target, which is left out, and the one
    in which the row ends. A choice within the loop would slow down all others.
    """
    ring, full, _empty = slots
    begin, blocks = part
    BLOCK: gl.constexpr = ring.shape[2]
    LINE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, CUBE))
    THREADS: gl.constexpr = 32 * gl.num_warps()
    m = gl.full([THREADS], float("-inf"), gl.float32, LINE)
    c = gl.full([THREADS], 0.0, gl.float32, LINE)
    s = gl.full([THREADS], 0.0, gl.float32, LINE)
    sum_x = gl.full([THREADS], 0.0, gl.float32, LINE)
    with_target = gl.where(mine, (y - begin) // BLOCK, -1)
    with_end = (vocabulary - begin) // BLOCK
    for b in range(blocks):
        if (b != with_target) & (b != with_end):
            place, place_phase = _ahead(slot, phase, b, SLOTS)
            mbarrier.wait(full.index(place), place_phase)
            x = read(ring.index(place), bend, SCALED, CAPPED, FLAT, CUBE)
            if SMOOTHED:
                sum_x += gl.sum(gl.sum(x, 2), 0)
            m, c, s = fold(m, c, s, x)
    for masked in gl.static_range(2):
        b = with_target if masked == 0 else with_end
        if (b >= 0) & (b < blocks) & ((masked == 0) | (with_end != with_target)):
            place, place_phase = _ahead(slot, phase, b, SLOTS)
            mbarrier.wait(full.index(place), place_phase)
            x = read(ring.index(place), bend, SCALED, CAPPED, FLAT, CUBE)
            column = begin + b * BLOCK + inside
            if SMOOTHED:
                sum_x += gl.sum(gl.sum(gl.where(column < vocabulary, x, 0.0), 2), 0)
            m, c, s = fold(m, c, s, gl.where((column < vocabulary) & (column != y), x, float("-inf")))
    return m, c, s, sum_x


@gluon.jit
def _second_look(
    slots,
    slot,
    part,
    inside,
    g_row,
    vocabulary,
    y,
    x_y,
    g_y,
    ref,
    factor,
    constant,
    is_dead,
    bend,
    SCALED: gl.constexpr,
    CAPPED: gl.constexpr,
    SMOOTHED: gl.constexpr,
    SLOTS: gl.constexpr,
    FLAT: gl.constexpr,
    CUBE: gl.constexpr,
):
    """Write a row's gradient, from the slots of the first look; each goes back to the producer."""
    ring, _full, empty = slots
    begin, blocks = part
    logit_scale, softcap = bend
    BLOCK: gl.constexpr = ring.shape[2]
    per_softcap = 1.0
    if CAPPED:
        per_softcap = 1 / softcap
    for b in range(blocks):
        x = read(ring.index(slot), bend, SCALED, CAPPED, FLAT, CUBE)
        g = exp(x - ref) * factor
        column = begin + b * BLOCK
        if (is_dead != 0) | ((y >= column) & (y < column + BLOCK)):
            g = gl.where(column + inside == y, g_y, g)
            g = gl.where(is_dead != 0, 0.0, g)
        if SMOOTHED:
            g = gl.where(is_dead != 0, 0.0, g - constant)
        if CAPPED:
            bent = gl.where(column + inside == y, x_y, x) * per_softcap
            g *= gl.where(is_dead != 0, 1.0, 1 - bent * bent)
        if SCALED:
            g *= logit_scale
        place = g_row + column + inside
        if column + BLOCK > vocabulary:
            gl.store(place, g.to(ring.dtype), mask=column + inside < vocabulary, cache_modifier=".cs")
        else:
            gl.store(place, g.to(ring.dtype), cache_modifier=".cs")
        # Not sooner: a barrier does not wait for loads whose values nobody has used, and the copy engine would
        # overwrite them. The stores above have used them.
        mbarrier.arrive(empty.index(slot))
        slot, _phase = _ahead(slot, 0, 1, SLOTS)


@gluon.jit
def _consume(
    slots,
    logits,
    grad,
    facts,
    results,
    words,
    rows,
    vocabulary,
    strides,
    numbers,
    walk,
    part,
    member,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    SCALED: gl.constexpr,
    CAPPED: gl.constexpr,
    Z_LOSS: gl.constexpr,
    SMOOTHED: gl.constexpr,
    EXACT_TARGETS: gl.constexpr,
    LSE: gl.constexpr,
    NLL: gl.constexpr,
    Z_TERM: gl.constexpr,
):
    """All other warps: the losses and gradients of rows, in the order in which the producer loads them."""
    target, target_logits, weight, scale, dead = facts
    loss, lse_out, nll_out, z_out = results
    stride, grad_stride = strides
    keep, spread, z_loss, softcap, logit_scale = numbers
    bend = (logit_scale, softcap)
    first, step = walk
    begin, blocks = part
    # A block seen as [REP, THREADS, VEC]: the first and last axes lie within a thread, so reducing them is free.
    BLOCK: gl.constexpr = slots[0].shape[2]
    VEC: gl.constexpr = 128 // slots[0].dtype.primitive_bitwidth
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    REP: gl.constexpr = BLOCK // (THREADS * VEC)
    FLAT: gl.constexpr = gl.BlockedLayout([1, VEC], [1, 32], [1, WARPS], [1, 0])
    CUBE: gl.constexpr = gl.BlockedLayout([REP, 1, VEC], [1, 32, 1], [1, WARPS, 1], [2, 1, 0])
    PLANE: gl.constexpr = gl.SliceLayout(2, CUBE)
    c0 = gl.arange(0, REP, layout=gl.SliceLayout(1, PLANE))
    c1 = gl.arange(0, THREADS, layout=gl.SliceLayout(0, PLANE))
    c2 = gl.arange(0, VEC, layout=gl.SliceLayout(0, gl.SliceLayout(1, CUBE)))
    inside = (c0[:, None] * (THREADS * VEC) + c1[None, :] * VEC)[:, :, None] + c2[None, None, :]

    slot = 0
    phase = 0
    # What a row needs besides its logits is loaded one row ahead.
    y = gl.load(target + first)
    r = gl.load(scale + first)
    a = gl.load(weight + first)
    is_dead = gl.load(dead + first).to(gl.int32)
    for row in range(first, rows, step):
        following = gl.minimum(row + step, rows - 1)
        y_next = gl.load(target + following)
        r_next = gl.load(scale + following)
        a_next = gl.load(weight + following)
        is_dead_next = gl.load(dead + following).to(gl.int32)

        row64 = row.to(gl.int64)
        g_row = grad + row64 * grad_stride
        y = y.to(gl.int32)
        mine = (y >= begin) & (y < begin + blocks * BLOCK)
        if EXACT_TARGETS:
            z_y = gl.load(target_logits + row)
        else:
            z_y = gl.load(logits + row64 * stride + y, mask=mine, other=0.0).to(gl.float32)

        m, c, s, sum_x = _first_look(
            slots, slot, phase, part, inside, vocabulary, y, mine, bend,
            SCALED, CAPPED, SMOOTHED, SLOTS, FLAT, CUBE,
        )  # fmt: skip

        # The row's reference and sum; the target joins in the program that holds it.
        x_y = activate(z_y, bend, SCALED, CAPPED)
        joining = gl.where(mine, x_y, float("-inf"))
        top = gl.maximum(gl.max(m, 0), joining)
        ref = finite(top)
        others = gl.sum(s * fade(c, ref), 0)
        row_sum = others + exp(joining - ref)
        row_sum_x = 0.0
        if SMOOTHED:
            row_sum_x = gl.sum(sum_x, 0)
        if GROUP > 1:
            ref, others, row_sum, row_sum_x = exchange(
                words, row64, member, top, ref, others, row_sum, row_sum_x, GROUP, SMOOTHED
            )

        # The row's loss, by the program that holds its target.
        ln_sum = gl.log(row_sum)
        nll = ln_sum + (ref - x_y)
        lse = ref + ln_sum
        cost = keep * nll
        share = keep + spread * vocabulary
        if Z_LOSS:
            cost += z_loss * lse * lse
            share += 2 * z_loss * lse
        if SMOOTHED:
            cost += spread * (vocabulary * lse - row_sum_x)
        gl.store(loss + row, gl.where(is_dead != 0, 0.0, a * cost), mask=mine)
        if LSE:
            gl.store(lse_out + row, lse, mask=mine)
        if NLL:
            gl.store(nll_out + row, nll, mask=mine)
        if Z_TERM:
            gl.store(z_out + row, gl.where(is_dead != 0, 0.0, a * z_loss * lse * lse), mask=mine)
        factor = r * share / row_sum
        # 1 - p of the target is the others' p, and would cancel where the target's is nearly 1.
        g_y = r * ((share - keep) * exp(x_y - ref) - keep * others) / row_sum

        _second_look(
            slots, slot, part, inside, g_row, vocabulary, y, x_y, g_y, ref, factor, spread * r, is_dead, bend,
            SCALED, CAPPED, SMOOTHED, SLOTS, FLAT, CUBE,
        )  # fmt: skip
        slot, phase = _ahead(slot, phase, blocks, SLOTS)
        y = y_next
        r = r_next
        a = a_next
        is_dead = is_dead_next


_PER_ROW = ["target", "target_logits", "weight", "scale", "dead", "loss", "lse_out", "nll_out", "z_out", "words"]


@gluon.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=_PER_ROW)
def ring_kernel(
    descriptor,  # the logits for the copy engine: (R, V) in blocks of [1, BLOCK]
    logits,
    grad,  # may be the logits
    target,  # (R,) int64
    target_logits,  # (R,) float32, with EXACT_TARGETS
    weight,  # (R,) float32, a
    scale,  # (R,) float32, r
    dead,  # (R,) bool: loss and gradient are exactly 0
    loss,  # (R,) float32
    lse_out,  # (R,) float32, with LSE, and so on
    nll_out,
    z_out,
    words,  # int64, zero: GROUP a row (2 GROUP with SMOOTHED), then the ticket counter; with GROUP > 1
    rows,
    vocabulary_units,  # in units of 16 bytes: so the compiler knows what divides them
    stride_units,
    grad_stride_units,
    keep,  # 1 - e
    spread,  # e / V
    z_loss,
    softcap,
    logit_scale,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    SCALED: gl.constexpr,
    CAPPED: gl.constexpr,
    Z_LOSS: gl.constexpr,
    SMOOTHED: gl.constexpr,
    EXACT_TARGETS: gl.constexpr,
    LSE: gl.constexpr,
    NLL: gl.constexpr,
    Z_TERM: gl.constexpr,
):
    """Loss and gradient of every row; see the module's docstring."""
    dtype: gl.constexpr = descriptor.dtype
    VEC: gl.constexpr = 128 // dtype.primitive_bitwidth
    ring = gl.allocate_shared_memory(dtype, [SLOTS, 1, BLOCK], descriptor.layout)
    full, empty = barriers(SLOTS, 1)
    fence_async_shared()
    vocabulary = vocabulary_units * VEC
    stride = stride_units.to(gl.int64) * VEC
    grad_stride = grad_stride_units.to(gl.int64) * VEC
    ticket = gl.program_id(0)
    if GROUP > 1:
        counter = words + rows.to(gl.int64) * (GROUP * (2 if SMOOTHED else 1))
        ticket = gl.atomic_add(counter, 1, sem="relaxed").to(gl.int32)
    member = ticket % GROUP
    walk = (ticket // GROUP, gl.num_programs(0) // GROUP)  # the first row, and the step from one to the next
    row_blocks = gl.cdiv(vocabulary, BLOCK)
    part_blocks = gl.cdiv(row_blocks, GROUP)
    first_block = member * part_blocks
    part = (first_block * BLOCK, gl.minimum(part_blocks, row_blocks - first_block))  # the first class, and blocks
    slots = (ring, full, empty)
    facts = (target, target_logits, weight, scale, dead)
    results = (loss, lse_out, nll_out, z_out)
    strides = (stride, grad_stride)
    numbers = (keep, spread, z_loss, softcap, logit_scale)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    slots, logits, grad, facts, results, words, rows, vocabulary, strides, numbers, walk, part, member,
                    SLOTS, GROUP, SCALED, CAPPED, Z_LOSS, SMOOTHED, EXACT_TARGETS, LSE, NLL, Z_TERM,
                ),
            ),
            (_produce, (slots, descriptor, rows, walk, part, BLOCK, SLOTS)),
        ],
        [1],  # warps of the producer
        [24],  # and its registers
    )  # fmt: skip
