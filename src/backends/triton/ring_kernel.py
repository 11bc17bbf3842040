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

from xent.backends.triton.ring_parts import activate, await_word, exp, fade, finite, fold, pack, read

__all__ = ["ring_kernel"]


@gluon.jit
def _ahead(slot, phase, steps, SLOTS: gl.constexpr):
    """Return the slot so many steps on, at most once around, and the phase of its barrier."""
    slot += steps
    wrapped = slot >= SLOTS
    return gl.where(wrapped, slot - SLOTS, slot), phase ^ wrapped.to(gl.int32)


@gluon.jit
def _produce(
    descriptor,
    ring,
    full,
    empty,
    rows,
    first,
    step,
    begin,
    blocks,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """One warp: every free slot starts to load the next block at once."""
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
def _consume(
    ring,
    full,
    empty,
    logits,
    grad,
    target,
    target_logits,
    weight,
    scale,
    dead,
    loss,
    lse_out,
    nll_out,
    z_out,
    words,
    rows,
    vocabulary,
    stride,
    grad_stride,
    keep,
    spread,
    z_loss,
    softcap,
    logit_scale,
    first,
    step,
    part,
    begin,
    blocks,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    VEC: gl.constexpr,
    SCALED: gl.constexpr,
    CAPPED: gl.constexpr,
    Z_LOSS: gl.constexpr,
    SMOOTHED: gl.constexpr,
    EXACT_TARGETS: gl.constexpr,
    LSE: gl.constexpr,
    NLL: gl.constexpr,
    Z_TERM: gl.constexpr,
):
    dtype: gl.constexpr = ring.dtype
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    REP: gl.constexpr = BLOCK // (THREADS * VEC)
    # A block seen as [REP, THREADS, VEC]: the first and last axes lie within a thread, so reducing them is free.
    FLAT: gl.constexpr = gl.BlockedLayout([1, VEC], [1, 32], [1, WARPS], [1, 0])
    CUBE: gl.constexpr = gl.BlockedLayout([REP, 1, VEC], [1, 32, 1], [1, WARPS, 1], [2, 1, 0])
    PLANE: gl.constexpr = gl.SliceLayout(2, CUBE)
    LINE: gl.constexpr = gl.SliceLayout(0, PLANE)
    c0 = gl.arange(0, REP, layout=gl.SliceLayout(1, PLANE))
    c1 = gl.arange(0, THREADS, layout=gl.SliceLayout(0, PLANE))
    c2 = gl.arange(0, VEC, layout=gl.SliceLayout(0, gl.SliceLayout(1, CUBE)))
    inside = (c0[:, None] * (THREADS * VEC) + c1[None, :] * VEC)[:, :, None] + c2[None, None, :]

    per_softcap = 1.0
    if CAPPED:
        per_softcap = 1 / softcap
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

        # Pass 1: each thread its own maximum and sum, as the blocks arrive. Two come last: the one with the target,
        # which is left out, and the one in which the row ends. A choice within the loop would slow down all others.
        m = gl.full([THREADS], float("-inf"), gl.float32, LINE)
        c = gl.full([THREADS], 0.0, gl.float32, LINE)
        s = gl.full([THREADS], 0.0, gl.float32, LINE)
        sum_x = gl.full([THREADS], 0.0, gl.float32, LINE)
        slot_again = slot
        with_target = gl.where(mine, (y - begin) // BLOCK, -1)
        with_end = (vocabulary - begin) // BLOCK
        for b in range(blocks):
            if (b != with_target) & (b != with_end):
                place, place_phase = _ahead(slot, phase, b, SLOTS)
                mbarrier.wait(full.index(place), place_phase)
                x = read(ring.index(place), logit_scale, softcap, SCALED, CAPPED, FLAT, CUBE)
                if SMOOTHED:
                    sum_x += gl.sum(gl.sum(x, 2), 0)
                m, c, s = fold(m, c, s, x)
        for masked in gl.static_range(2):
            b = with_target if masked == 0 else with_end
            if (b >= 0) & (b < blocks) & ((masked == 0) | (with_end != with_target)):
                place, place_phase = _ahead(slot, phase, b, SLOTS)
                mbarrier.wait(full.index(place), place_phase)
                x = read(ring.index(place), logit_scale, softcap, SCALED, CAPPED, FLAT, CUBE)
                column = begin + b * BLOCK + inside
                if SMOOTHED:
                    sum_x += gl.sum(gl.sum(gl.where(column < vocabulary, x, 0.0), 2), 0)
                m, c, s = fold(m, c, s, gl.where((column < vocabulary) & (column != y), x, float("-inf")))
        slot, phase = _ahead(slot, phase, blocks, SLOTS)

        # The row's reference and sum; the target joins in the program that holds it.
        x_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED)
        joining = gl.where(mine, x_y, float("-inf"))
        top = gl.maximum(gl.max(m, 0), joining)
        ref = finite(top)
        others = gl.sum(s * fade(c, ref), 0)
        row_sum = others + exp(joining - ref)
        row_sum_x = 0.0
        if SMOOTHED:
            row_sum_x = gl.sum(sum_x, 0)
        if GROUP > 1:
            WORDS: gl.constexpr = 2 if SMOOTHED else 1
            word = words + row64 * (GROUP * WORDS)
            gl.atomic_xchg(word + part * WORDS, pack(top, row_sum), sem="relaxed")
            if SMOOTHED:
                gl.atomic_xchg(word + part * WORDS + 1, pack(row_sum_x * 0 + 1.0, row_sum_x), sem="relaxed")
            tops = ()
            sums = ()
            own_ref = ref
            own_others = others
            top = row_sum * 0 + float("-inf")
            row_sum_x = row_sum * 0
            for j in gl.static_range(GROUP):
                top_j, sum_j = await_word(word + j * WORDS)
                tops = tops + (top_j,)
                sums = sums + (sum_j,)
                top = gl.maximum(top, top_j)
                if SMOOTHED:
                    _, sum_x_j = await_word(word + j * WORDS + 1)
                    row_sum_x += sum_x_j
            ref = finite(top)
            row_sum = row_sum * 0
            others = row_sum
            for j in gl.static_range(GROUP):
                sum_j = sums[j] * fade(finite(tops[j]), ref)
                row_sum += sum_j
                others += gl.where(part == j, own_others * fade(own_ref, ref), sum_j)

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

        # Pass 2: the gradient, from the same slots; each goes back to the producer.
        for b in range(blocks):
            x = read(ring.index(slot_again), logit_scale, softcap, SCALED, CAPPED, FLAT, CUBE)
            g = exp(x - ref) * factor
            column = begin + b * BLOCK
            if (is_dead != 0) | ((y >= column) & (y < column + BLOCK)):
                g = gl.where(column + inside == y, g_y, g)
                g = gl.where(is_dead != 0, 0.0, g)
            if SMOOTHED:
                g = gl.where(is_dead != 0, 0.0, g - spread * r)
            if CAPPED:
                bent = gl.where(column + inside == y, x_y, x) * per_softcap
                g *= gl.where(is_dead != 0, 1.0, 1 - bent * bent)
            if SCALED:
                g *= logit_scale
            place = g_row + column + inside
            if column + BLOCK > vocabulary:
                gl.store(place, g.to(dtype), mask=column + inside < vocabulary, cache_modifier=".cs")
            else:
                gl.store(place, g.to(dtype), cache_modifier=".cs")
            # Not sooner: a barrier does not wait for loads whose values nobody has used, and the copy engine would
            # overwrite them. The stores above have used them.
            mbarrier.arrive(empty.index(slot_again))
            slot_again, _phase = _ahead(slot_again, phase, 1, SLOTS)
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
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()  # or the copy engine might come upon a barrier that is not there yet
    vocabulary = vocabulary_units * VEC
    stride = stride_units.to(gl.int64) * VEC
    grad_stride = grad_stride_units.to(gl.int64) * VEC
    ticket = gl.program_id(0)
    if GROUP > 1:
        counter = words + rows.to(gl.int64) * (GROUP * (2 if SMOOTHED else 1))
        ticket = gl.atomic_add(counter, 1, sem="relaxed").to(gl.int32)
    part = ticket % GROUP
    first = ticket // GROUP
    step = gl.num_programs(0) // GROUP
    row_blocks = gl.cdiv(vocabulary, BLOCK)
    part_blocks = gl.cdiv(row_blocks, GROUP)
    begin = part * part_blocks * BLOCK
    blocks = gl.minimum(part_blocks, row_blocks - part * part_blocks)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    ring,
                    full,
                    empty,
                    logits,
                    grad,
                    target,
                    target_logits,
                    weight,
                    scale,
                    dead,
                    loss,
                    lse_out,
                    nll_out,
                    z_out,
                    words,
                    rows,
                    vocabulary,
                    stride,
                    grad_stride,
                    keep,
                    spread,
                    z_loss,
                    softcap,
                    logit_scale,
                    first,
                    step,
                    part,
                    begin,
                    blocks,
                    BLOCK,
                    SLOTS,
                    GROUP,
                    VEC,
                    SCALED,
                    CAPPED,
                    Z_LOSS,
                    SMOOTHED,
                    EXACT_TARGETS,
                    LSE,
                    NLL,
                    Z_TERM,
                ),
            ),
            (
                _produce,
                (
                    descriptor,
                    ring,
                    full,
                    empty,
                    rows,
                    first,
                    step,
                    begin,
                    blocks,
                    BLOCK,
                    SLOTS,
                ),
            ),
        ],
        [1],
        [24],
    )
